// Name, state, progress and pace of the run.

import { h, setText } from "./dom";
import { duration } from "./format";
import type { Store, Topic } from "./store";

/** A sign beside the word, so that the state does not hang on colour alone. */
const SIGNS: Record<string, string> = {
  starting: "◌", running: "●", paused: "❚❚", stopping: "◍", stopped: "■", finished: "✓", failed: "✕",
};
const STALE_S = 15;

export class StatusPanel {
  readonly element: HTMLElement;
  private readonly name = h("span", { class: "rlk-name" });
  private readonly sign = h("span", { "aria-hidden": "true", class: "rlk-sign" });
  private readonly state = h("span", { "data-rlkit": "status" });
  private readonly pill = h("span", { class: "rlk-pill" }, this.sign, this.state);
  private readonly step = h("span", { "data-rlkit": "step" });
  private readonly total = h("span", { class: "rlk-faint", "data-rlkit": "total-steps" });
  private readonly bar = h("progress", { class: "rlk-progress", "aria-label": "Steps done", "data-rlkit": "progress" });
  private readonly pace = h("span", { class: "rlk-faint", "data-rlkit": "pace" });
  private readonly note = h("p", { class: "rlk-note", "data-rlkit": "notice", hidden: true });

  constructor(private readonly store: Store) {
    this.element = h(
      "section", { class: "rlk-status", "aria-label": "Status of the run" },
      h("div", { class: "rlk-line" },
        this.name, this.pill,
        h("span", { class: "rlk-steps" }, "step ", this.step, this.total),
        this.bar, this.pace),
      this.note);
  }

  update(changed: ReadonlySet<Topic>): void {
    if (!changed.has("status") && !changed.has("link")) return;
    const { status } = this.store;
    const state = status.state ?? (this.store.linked ? "starting" : "connecting");
    setText(this.name, this.store.run);
    this.name.title = this.store.folder;
    setText(this.state, state);
    setText(this.sign, SIGNS[state] ?? "◌");
    this.pill.dataset["state"] = state;
    setText(this.step, String(status.step ?? 0));
    setText(this.total, status.total_steps ? ` / ${status.total_steps}` : "");
    this.bar.hidden = !status.total_steps;
    this.bar.max = status.total_steps ?? 1;
    this.bar.value = status.step ?? 0;
    setText(this.pace, this.paceText());
    const notice = this.notice();
    setText(this.note, notice);
    this.note.hidden = notice === "";
    const plain = notice === status.reason && status.state !== "failed";
    this.note.dataset["level"] = plain ? "plain" : "warning";
  }

  private paceText(): string {
    const { state, step, total_steps: total, step_seconds: seconds } = this.store.status;
    if (seconds === null) return "";
    const pace = `${seconds < 10 ? seconds.toPrecision(2) : Math.round(seconds)} s/step`;
    if (state !== "running" || !total || step === null) return pace;
    return `${pace} · ${duration(Math.max(0, total - step) * seconds)} left`;
  }

  private notice(): string {
    const { store } = this;
    if (store.error !== null) return `This view could not follow the run: ${store.error}`;
    if (!store.linked && store.status.state !== null) {
      return "No word from the kernel: this is the last view. Run the cell again to go on watching; the run itself is not affected.";
    }
    if (store.status.parked) return "Nobody drives the run now; its trainer goes on where it was started.";
    if (store.status.alive && store.status.age > STALE_S) {
      return `No sign of life from the run for ${duration(store.status.age)}. Its log is log.txt in the run folder.`;
    }
    return store.status.reason ?? "";
  }
}
