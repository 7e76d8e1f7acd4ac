// The strips, grouped by area. A metric that was never seen before gets its strip by itself.

import type { Line, Mark } from "./chart";
import { h, setText, uniqueId } from "./dom";
import { asked, splitName } from "./format";
import type { Store, Topic } from "./store";
import { Strip } from "./strip";
import { onThemeChange } from "./theme";

/** Areas in the order a reader wants them; others follow by name, machine figures come last and closed. */
const FIRST = ["reward", "kl", "policy", "actor", "loss", "train", "critic", "value", "rollout", "response"];
const LAST = ["memory", "time", "timing", "system"];
const TOTALS = ["reward/mean", "reward/total", "reward"];
const STRIP_HEIGHT = 84;
const WIDE_HEIGHT = 150;

class Area {
  readonly element: HTMLDetailsElement;
  readonly strips = new Map<string, Strip>();
  readonly grid = h("div", { class: "rlk-strips" });
  private readonly count = h("span", { class: "rlk-faint" });

  constructor(readonly name: string, shown: string) {
    this.element = h("details", { class: "rlk-area", open: !LAST.includes(name), "data-rlkit": `area-${name || "other"}` },
      h("summary", {}, shown, " ", this.count), this.grid);
  }

  add(key: string, strip: Strip): void {
    this.strips.set(key, strip);
    if (strip.element.classList.contains("rlk-wide")) this.grid.prepend(strip.element);
    else this.grid.append(strip.element);
    const lines = [...this.strips.keys()].filter((name) => name !== "reward-lines").length;
    setText(this.count, lines > 1 ? String(lines) : "");
  }
}

export class PlotsPanel {
  readonly element: HTMLElement;
  private readonly areas = new Map<string, Area>();
  private readonly known = new Set<string>();
  private readonly syncKey = uniqueId("cursor");
  private readonly byElement = new Map<Element, Strip>();
  private rewardLines: Line[] = [];
  private rewardStrip: Strip | null = null;
  private readonly cursor = h("span", { class: "rlk-cursor", "aria-hidden": "true" });
  private readonly body = h("div", { class: "rlk-areas" });
  private readonly empty = h("p", { class: "rlk-faint" }, "The first points appear after the first step.");
  private readonly seen = new IntersectionObserver((entries) => {
    for (const entry of entries) this.byElement.get(entry.target)?.setVisible(entry.isIntersecting);
  }, { rootMargin: "200px" });
  private readonly sizes = new ResizeObserver(() => this.strips((strip) => strip.resize()));
  private readonly stopTheme = onThemeChange(() => this.strips((strip) => strip.repaint()));

  constructor(private readonly store: Store) {
    this.element = h("section", { class: "rlk-plots", "aria-label": "Metrics", "data-rlkit": "plots" },
      this.cursor, this.empty, this.body);
    this.sizes.observe(this.body);
  }

  update(changed: ReadonlySet<Topic>): void {
    const points = changed.has("points");
    if (!points && !changed.has("settings") && !changed.has("requests")) return;
    if (this.store.series.size === 0 && points) this.clear();
    for (const name of this.store.series.keys()) if (!this.known.has(name)) this.place(name);
    if (changed.has("settings")) this.colourRewards();
    this.empty.hidden = this.known.size > 0;
    this.strips((strip) => strip.touch());
  }

  destroy(): void {
    this.stopTheme();
    this.sizes.disconnect();
    this.strips((strip) => strip.destroy());
    this.seen.disconnect();
  }

  /** A page that starts anew forgets its strips. */
  private clear(): void {
    this.strips((strip) => strip.destroy());
    this.areas.clear();
    this.known.clear();
    this.byElement.clear();
    this.rewardLines = [];
    this.rewardStrip = null;
    this.body.replaceChildren();
  }

  private strips(act: (strip: Strip) => void): void {
    for (const strip of this.byElement.values()) act(strip);
  }

  private place(name: string): void {
    this.known.add(name);
    if (this.isReward(name)) {
      this.addReward(name);
      return;
    }
    const area = this.areaOf(splitName(name)[0]);
    const strip = this.makeStrip(name, false);
    area.add(name, strip);
    strip.setLines([{ name, color: 0 }]);
  }

  /** The mixed reward and its raw terms share one chart: they answer one question. */
  private isReward(name: string): boolean {
    const [area, rest] = splitName(name);
    return TOTALS.includes(name) || (area === "reward" && rest in this.store.weights);
  }

  private addReward(name: string): void {
    this.rewardLines.push({ name, color: null });
    this.rewardStrip ??= this.makeStrip("reward", true);
    if (!this.areaOf("reward").strips.has("reward-lines")) this.areaOf("reward").add("reward-lines", this.rewardStrip);
    this.colourRewards();
  }

  /** Terms wear the colour of their row in the mixer; the total comes last, on top. */
  private colourRewards(): void {
    const terms = Object.keys(this.store.weights);
    for (const line of this.rewardLines) {
      const place = terms.indexOf(splitName(line.name)[1]);
      line.color = TOTALS.includes(line.name) || place < 0 ? null : place;
    }
    this.rewardLines.sort((a, b) => (a.color ?? 1e9) - (b.color ?? 1e9));
    this.rewardStrip?.setLines([...this.rewardLines]);
  }

  private makeStrip(key: string, wide: boolean): Strip {
    const strip = new Strip(this.store, {
      key, wide, height: wide ? WIDE_HEIGHT : STRIP_HEIGHT, syncKey: this.syncKey, marks: () => this.marks(),
      observer: this.seen, onCursor: (step) => setText(this.cursor, step === null ? "" : `at step ${step}`),
    });
    this.byElement.set(strip.element, strip);
    return strip;
  }

  private areaOf(name: string): Area {
    let area = this.areas.get(name);
    if (area) return area;
    area = new Area(name, name || "other");
    this.areas.set(name, area);
    const after = [...this.areas.values()].filter((other) => rank(other.name) > rank(name))
      .sort((a, b) => rank(a.name) - rank(b.name))[0];
    this.body.insertBefore(area.element, after?.element ?? null);
    return area;
  }

  private marks(): Mark[] {
    return this.store.notes.flatMap((note) =>
      note.status === "applied" && note.kind === "set" && note.step !== null ? [{ step: note.step, text: asked(note) }] : []);
  }
}

function rank(area: string): number {
  if (FIRST.includes(area)) return FIRST.indexOf(area);
  return LAST.includes(area) ? 100 + LAST.indexOf(area) : 50;
}
