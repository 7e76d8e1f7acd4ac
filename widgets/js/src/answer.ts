// The small text beside a control that says where its last request stands.

import { h, setText } from "./dom";
import { standing } from "./format";
import type { RequestNote } from "./protocol";

export class Answer {
  readonly element: HTMLElement;
  private note: RequestNote | null = null;

  constructor(name: string) {
    this.element = h("span", { class: "rlk-answer", "data-rlkit": `${name}-state` });
  }

  get pending(): boolean {
    return this.note?.status === "pending";
  }

  follow(note: RequestNote): void {
    this.note = note;
    this.update();
  }

  update(): void {
    const text = this.note === null ? "" : standing(this.note);
    setText(this.element, text);
    this.element.title = text;
    this.element.dataset["status"] = this.note?.status ?? "";
  }
}
