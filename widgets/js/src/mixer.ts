// The reward mixer: a slider and a number per term. What is asked for stays "pending" until the run has applied it.

import { Answer } from "./answer";
import { h, keepFocus, setText, uniqueId } from "./dom";
import { compact, exact } from "./format";
import type { Store, Topic } from "./store";
import { isDark, onThemeChange, seriesColor } from "./theme";

const SETTLE_MS = 180;

class TermRow {
  readonly element: HTMLElement;
  private readonly slider: HTMLInputElement;
  private readonly number: HTMLInputElement;
  private readonly answer: Answer;
  private readonly raw = h("span", { class: "rlk-raw" });
  private readonly swatch = h("span", { class: "rlk-swatch", "aria-hidden": "true" });
  private timer = 0;
  private wanted: number | null = null;

  constructor(private readonly store: Store, private readonly term: string, private readonly place: number) {
    const name = `mixer-${term}`;
    const stateId = uniqueId("answer");
    this.slider = h("input", {
      type: "range", class: "rlk-slider", "aria-label": `Weight of reward ${term}`, "aria-describedby": stateId,
      "data-rlkit": name,
    });
    this.number = h("input", {
      type: "number", step: "any", class: "rlk-number", "aria-label": `Weight of reward ${term}, as a number`,
      "aria-describedby": stateId, "data-rlkit": `${name}-number`,
    });
    this.answer = new Answer(name);
    this.answer.element.id = stateId;
    this.slider.addEventListener("input", () => this.want(Number(this.slider.value), SETTLE_MS));
    this.number.addEventListener("change", () => {
      const value = Number(this.number.value);
      if (this.number.value.trim() === "" || !Number.isFinite(value)) this.show(this.store.weights[term] ?? 0);
      else this.want(value, 0);
    });
    keepFocus(this.slider);
    keepFocus(this.number);
    const label = h("span", { class: "rlk-term", title: term }, this.swatch, h("span", { class: "rlk-clip" }, term));
    this.element = h("div", { class: "rlk-mixer-row", role: "group", "aria-label": `Reward ${term}` },
      label, this.slider, this.number, this.raw, this.answer.element);
    this.fitRange(store.weights[term] ?? 0);
    this.paint();
    this.update();
  }

  update(): void {
    this.answer.update();
    this.slider.disabled = this.number.disabled = !this.store.open;
    const mean = this.store.series.get(`reward/${this.term}`)?.last ?? null;
    setText(this.raw, mean === null ? "" : compact(mean));
    this.raw.title = mean === null ? "" : `Mean of ${this.term} over the latest step's rollouts, unweighted`;
    if (this.wanted !== null || this.answer.pending) return;
    if (document.activeElement === this.number && this.number.value !== this.number.dataset["shown"]) return;
    this.show(this.store.weights[this.term] ?? 0);
  }

  paint(): void {
    this.swatch.style.background = seriesColor(this.place, isDark());
  }

  destroy(): void {
    window.clearTimeout(this.timer);
  }

  /** Ask for a weight once the hand rests, so that a drag or a held key becomes one request. */
  private want(weight: number, after: number): void {
    this.wanted = weight;
    this.show(weight);
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      this.wanted = null;
      if (weight === this.store.weights[this.term] && !this.answer.pending) return;
      this.answer.follow(this.store.request("set", { reward_weights: { [this.term]: weight } }));
    }, after);
  }

  private show(weight: number): void {
    const text = exact(weight);
    if (weight < Number(this.slider.min) || weight > Number(this.slider.max)) this.fitRange(weight);
    if (Number(this.slider.value) !== weight) this.slider.value = String(weight);
    if (this.number.value !== text) this.number.value = text;
    this.number.dataset["shown"] = text;
    this.slider.setAttribute("aria-valuetext", text);
    const { min, max } = this.slider;
    const share = (Number(this.slider.value) - Number(min)) / (Number(max) - Number(min));
    this.slider.style.setProperty("--rlk-share", `${(100 * share).toFixed(1)}%`);
  }

  /** Range of the slider: what the run declares, else from 0 (or below for a negative weight) to a round number. */
  private fitRange(weight: number): void {
    const spec = this.store.specs["reward_weights"] ?? {};
    const low = typeof spec.min === "number" ? spec.min : weight < 0 ? -roundUp(-weight) : 0;
    const high = typeof spec.max === "number" ? spec.max : Math.max(1, roundUp(weight));
    this.slider.min = String(Math.min(low, weight));
    this.slider.max = String(Math.max(high, weight));
    this.slider.step = String(10 ** Math.floor(Math.log10((high - low) / 100) + 1e-9));
  }
}

/** The next of 1, 2, 5, 10, 20 ... that leaves room above `size`. */
function roundUp(size: number): number {
  const room = Math.max(1.5 * size, 1e-6);
  const power = 10 ** Math.floor(Math.log10(room));
  return ([1, 2, 5, 10].find((step) => step * power >= room) ?? 10) * power;
}

export class MixerPanel {
  readonly element: HTMLElement;
  private readonly rows = new Map<string, TermRow>();
  private readonly body = h("div", { class: "rlk-mixer-rows" });
  private readonly empty = h("p", { class: "rlk-faint" }, "Waiting for the reward terms of the run.");
  private readonly stopTheme = onThemeChange(() => this.rows.forEach((row) => row.paint()));

  constructor(private readonly store: Store) {
    this.element = h("section", { class: "rlk-mixer", "aria-label": "Reward mixer", "data-rlkit": "mixer" },
      h("h4", { class: "rlk-heading" }, "Reward weights"), this.empty, this.body);
  }

  update(changed: ReadonlySet<Topic>): void {
    if (changed.has("settings")) {
      Object.keys(this.store.weights).forEach((term, place) => {
        if (this.rows.has(term)) return;
        const row = new TermRow(this.store, term, place);
        this.rows.set(term, row);
        this.body.append(row.element);
      });
      this.empty.hidden = this.rows.size > 0;
    }
    for (const row of this.rows.values()) row.update();
  }

  destroy(): void {
    this.stopTheme();
    for (const row of this.rows.values()) row.destroy();
  }
}
