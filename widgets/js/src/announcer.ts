// Speaks to screen readers: changes of the run's state, and answers to requests.

import { h, setText } from "./dom";
import { asked, standing } from "./format";
import type { RequestNote } from "./protocol";
import type { Store, Topic } from "./store";

export class Announcer {
  readonly element = h("div", { class: "rlk-hidden", role: "status", "aria-live": "polite", "data-rlkit": "announcer" });
  private state: string | null = null;
  private readonly spoken = new WeakSet<RequestNote>();
  private greeted = false;

  constructor(private readonly store: Store) {}

  update(changed: ReadonlySet<Topic>): void {
    const words: string[] = [];
    const { status } = this.store;
    if (changed.has("status") && status.state !== this.state) {
      if (this.state !== null) words.push(`Run ${status.state} at step ${status.step ?? 0}.`);
      this.state = status.state;
    }
    if (changed.has("requests")) {
      for (const note of this.store.notes) {
        if (note.status === "pending" || this.spoken.has(note)) continue;
        this.spoken.add(note);
        if (this.greeted) words.push(`${asked(note)} ${standing(note)}.`);
      }
    }
    this.greeted = this.greeted || this.store.linked;
    if (words.length > 0) setText(this.element, words.join(" "));
  }
}
