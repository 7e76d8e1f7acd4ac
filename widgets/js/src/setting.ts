// One live setting: a labelled field that asks the run for a new value and shows what became of it.

import { Answer } from "./answer";
import { h, keepFocus } from "./dom";
import { exact } from "./format";
import type { SettingSpec } from "./protocol";
import type { Store } from "./store";

type Field = HTMLInputElement | HTMLSelectElement;

export class SettingField {
  readonly elements: HTMLElement[];
  private readonly field: Field;
  private readonly answer: Answer;
  private readonly spec: SettingSpec;

  constructor(private readonly store: Store, private readonly name: string, id: string) {
    this.spec = store.specs[name] ?? {};
    this.field = this.makeField(id);
    this.field.addEventListener("change", () => this.commit());
    keepFocus(this.field);
    this.answer = new Answer(`setting-${name}`);
    const label = h("label", { for: id, title: this.spec.doc }, name);
    this.elements = [label, this.field, this.answer.element];
    this.update();
  }

  /** Follow the run, unless somebody is typing here or waiting for an answer. */
  update(): void {
    this.answer.update();
    this.field.disabled = !this.store.open;
    const typing = document.activeElement === this.field && this.field.dataset["dirty"] === "yes";
    if (!typing && !this.answer.pending) this.write(this.store.settings[this.name]);
  }

  private makeField(id: string): Field {
    const common = { id, "data-rlkit": `setting-${this.name}`, class: "rlk-number", title: this.spec.doc };
    const value = this.store.settings[this.name];
    if (this.spec.choices) {
      return h("select", common, ...this.spec.choices.map((choice) => h("option", { value: choice }, String(choice))));
    }
    if (typeof value === "boolean") return h("input", { ...common, class: "rlk-check", type: "checkbox" });
    const field = h("input", { ...common, type: typeof value === "string" ? "text" : "number", step: "any" });
    if (this.spec.type === "int") field.step = "1";
    if (value === null) field.placeholder = "off";
    if (typeof this.spec.min === "number") field.min = String(this.spec.min);
    if (typeof this.spec.max === "number") field.max = String(this.spec.max);
    field.addEventListener("input", () => (field.dataset["dirty"] = "yes"));
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      field.dataset["dirty"] = "";
      this.write(this.store.settings[this.name]);
    });
    return field;
  }

  private commit(): void {
    this.field.dataset["dirty"] = "";
    const value = this.read();
    if (value === undefined || value === this.store.settings[this.name]) {
      this.write(this.store.settings[this.name]);
      return;
    }
    this.answer.follow(this.store.request("set", { [this.name]: value }));
  }

  private read(): string | number | boolean | undefined {
    const { field } = this;
    if (field instanceof HTMLInputElement && field.type === "checkbox") return field.checked;
    const current = this.store.settings[this.name];
    if (typeof current === "string") return field.value;
    const number = Number(field.value);
    return field.value.trim() === "" || !Number.isFinite(number) ? undefined : number;
  }

  private write(value: unknown): void {
    const { field } = this;
    if (field instanceof HTMLInputElement && field.type === "checkbox") {
      field.checked = value === true;
      return;
    }
    const text = typeof value === "number" ? exact(value) : String(value ?? "");
    if (field.value !== text) field.value = text;
  }
}
