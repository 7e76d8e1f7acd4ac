// Buttons that steer the run, its live settings, and what was asked lately.

import { Answer } from "./answer";
import { h, keepFocus, setText, uniqueId } from "./dom";
import { asked, standing } from "./format";
import type { RequestNote } from "./protocol";
import { SettingField } from "./setting";
import type { Store, Topic } from "./store";

const NOTES_SHOWN = 3;
/** Shown at once; the others open below them. */
const FIRST_SETTINGS = ["lr", "kl_coef", "temperature"];
const CONFIRM_MS = 4000;

export class ControlsPanel {
  readonly element: HTMLElement;
  private readonly pause = this.button("pause", "Pause", () => this.press(this.paused ? "resume" : "pause"));
  private readonly count = h("input", {
    type: "number", min: 1, step: 1, value: 1, class: "rlk-number rlk-count", "aria-label": "Steps to take",
    "data-rlkit": "control-step-count",
  });
  private readonly stepButton = this.button("step", "Step", () =>
    this.press("step", { n: Math.max(1, Math.round(Number(this.count.value) || 1)) }));
  private readonly checkpoint = this.button("checkpoint", "Checkpoint", () => this.press("checkpoint"));
  private readonly stop = this.button("stop", "Stop", () => this.pressStop());
  private readonly answer = new Answer("control");
  private readonly fields = new Map<string, SettingField>();
  private readonly grid = h("div", { class: "rlk-settings" });
  private readonly heading = h("h4", { class: "rlk-heading", hidden: true }, "Live settings");
  private readonly moreGrid = h("div", { class: "rlk-settings" });
  private readonly moreCount = h("span", { class: "rlk-faint" });
  private readonly more = h("details", { class: "rlk-more", hidden: true, "data-rlkit": "more-settings" },
    h("summary", {}, "More ", this.moreCount), this.moreGrid);
  private readonly log = h("ul", { class: "rlk-log", "data-rlkit": "requests", "aria-label": "Latest requests" });
  private confirming = 0;

  constructor(private readonly store: Store) {
    keepFocus(this.count);
    this.element = h(
      "section", { class: "rlk-controls", "aria-label": "Controls of the run" },
      h("div", { class: "rlk-line", role: "group", "aria-label": "Steer the run" },
        this.pause, this.checkpoint, this.stop, h("span", { class: "rlk-join" }, this.stepButton, this.count),
        this.answer.element),
      this.heading, this.grid, this.more, this.log);
  }

  update(changed: ReadonlySet<Topic>): void {
    if (changed.has("status") || changed.has("link")) this.showButtons();
    if (changed.has("settings")) this.showFields();
    if (changed.has("requests")) {
      this.answer.update();
      this.showLog();
    }
    if (!changed.has("points")) for (const field of this.fields.values()) field.update();
  }

  destroy(): void {
    window.clearTimeout(this.confirming);
  }

  private get paused(): boolean {
    return this.store.status.state === "paused";
  }

  private button(name: string, text: string, press: () => void): HTMLButtonElement {
    const button = h("button", { type: "button", class: "rlk-button", "data-rlkit": `control-${name}` }, text);
    button.addEventListener("click", press);
    keepFocus(button);
    return button;
  }

  private press(kind: string, args: Record<string, unknown> = {}): void {
    this.answer.follow(this.store.request(kind, args));
  }

  /** Stopping cannot be taken back from here, so it takes a second press within four seconds. */
  private pressStop(): void {
    if (this.confirming !== 0) {
      this.calm();
      this.press("stop");
      return;
    }
    setText(this.stop, "Press again to stop");
    this.stop.classList.add("rlk-danger");
    this.confirming = window.setTimeout(() => this.calm(), CONFIRM_MS);
  }

  private calm(): void {
    window.clearTimeout(this.confirming);
    this.confirming = 0;
    setText(this.stop, "Stop");
    this.stop.classList.remove("rlk-danger");
  }

  private showButtons(): void {
    const { open } = this.store;
    setText(this.pause, this.paused ? "Resume" : "Pause");
    this.pause.dataset["rlkit"] = this.paused ? "control-resume" : "control-pause";
    this.pause.disabled = this.stop.disabled = this.checkpoint.disabled = !open;
    this.stepButton.disabled = this.count.disabled = !open || !this.paused;
    this.stepButton.title = this.paused ? "Take this many steps, then pause again" : "Pause the run to take single steps";
  }

  private showFields(): void {
    const names = Object.keys(this.store.settings).filter((name) => {
      const value = this.store.settings[name];
      return name !== "reward_weights" && (value === null || typeof value !== "object");
    });
    for (const name of names) {
      if (this.fields.has(name)) continue;
      const field = new SettingField(this.store, name, uniqueId("setting"));
      this.fields.set(name, field);
      const first = FIRST_SETTINGS.includes(name) || names.length <= 5;
      (first ? this.grid : this.moreGrid).append(...field.elements);
    }
    const hidden = names.filter((name) => this.moreGrid.contains(this.fields.get(name)!.elements[0]!)).length;
    this.more.hidden = hidden === 0;
    setText(this.moreCount, String(hidden));
    this.heading.hidden = names.length === 0;
  }

  private showLog(): void {
    const answered = this.store.notes.filter((note) => note.status !== "pending").slice(-NOTES_SHOWN).reverse();
    this.log.replaceChildren(...answered.map(noteItem));
  }
}

function noteItem(note: RequestNote): HTMLElement {
  const sign = note.status === "applied" ? "✓" : "✕";
  return h("li", { "data-status": note.status },
    h("span", { "aria-hidden": "true" }, sign), ` ${asked(note)} `,
    h("span", { class: "rlk-faint" }, `${standing(note)}${note.source === "widget" ? "" : `, from ${note.source}`}`));
}
