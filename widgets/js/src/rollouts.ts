// The rollouts of one step as a table: texts, every reward term, length, finish reason. Rows open to the full texts.

import { h, keepFocus, setText } from "./dom";
import { compact } from "./format";
import type { RolloutRow, Rollouts } from "./protocol";
import type { Store, Topic } from "./store";

interface Column {
  key: string;
  title: string;
  number: boolean;
  value: (row: RolloutRow) => number | string | null;
}

export class RolloutsPanel {
  readonly element: HTMLElement;
  private readonly caption = h("span", { class: "rlk-faint" });
  private readonly step = h("span", { "data-rlkit": "rollouts-step" });
  private readonly back = this.button("rollouts-previous", "◂", "Earlier step", () => this.go(this.shown?.previous));
  private readonly on = this.button("rollouts-next", "▸", "Later step", () => this.go(this.shown?.next));
  private readonly latest = this.button("rollouts-latest", "Latest", "Follow the newest step", () => this.ask(null));
  private readonly head = h("tr");
  private readonly body = h("tbody");
  private readonly table = h("table", { class: "rlk-table" }, h("thead", {}, this.head), this.body);
  private readonly scroll = h("div", {
    class: "rlk-scroll", tabindex: 0, role: "region", "aria-label": "Table of rollouts", hidden: true,
  }, this.table);
  private readonly empty = h("p", { class: "rlk-faint" }, "No rollouts yet.");
  private readonly open = new Set<string>();
  private sortKey = "place";
  private descending = false;
  private following = true;

  constructor(private readonly store: Store) {
    this.element = h("section", { class: "rlk-rollouts", "aria-label": "Rollouts", "data-rlkit": "rollouts" },
      h("div", { class: "rlk-line" },
        h("h4", { class: "rlk-heading" }, "Rollouts of step ", this.step), this.back, this.on, this.latest, this.caption),
      this.empty, this.scroll);
  }

  update(changed: ReadonlySet<Topic>): void {
    if (changed.has("rollouts")) this.draw();
    if (changed.has("link")) this.showButtons();
  }

  private get shown(): Rollouts | null {
    return this.store.rollouts;
  }

  private button(name: string, text: string, label: string, press: () => void): HTMLButtonElement {
    const button = h("button",
      { type: "button", class: "rlk-button rlk-small", "data-rlkit": name, "aria-label": label, title: label }, text);
    button.addEventListener("click", press);
    keepFocus(button);
    return button;
  }

  private go(step: number | null | undefined): void {
    if (step !== null && step !== undefined) this.ask(step);
  }

  private ask(step: number | null): void {
    this.following = step === null;
    this.store.send({ kind: "rollouts", step });
  }

  private showButtons(): void {
    const { linked } = this.store;
    this.back.disabled = !linked || this.shown?.previous == null;
    this.on.disabled = !linked || this.shown?.next == null;
    this.latest.disabled = !linked;
    this.latest.setAttribute("aria-pressed", String(this.following));
  }

  private draw(): void {
    const { shown } = this;
    if (!shown) return;
    this.showButtons();
    setText(this.step, shown.step === null ? "–" : String(shown.step));
    const total = shown.total ?? 0;
    setText(this.caption, shown.error ?? (total > shown.rows.length ? `first ${shown.rows.length} of ${total}` : ""));
    this.empty.hidden = shown.rows.length > 0 || shown.error !== undefined;
    this.scroll.hidden = shown.rows.length === 0;
    const columns = this.columns(shown);
    this.head.replaceChildren(...columns.map((column) => this.heading(column)));
    const rows = this.sorted(shown.rows, columns);
    const scale = Math.max(1e-9, ...rows.map((row) => Math.abs(row.reward ?? 0)));
    this.body.replaceChildren(...rows.map((row) => this.row(shown, row, columns, scale)));
  }

  private columns(shown: Rollouts): Column[] {
    const terms = (shown.terms ?? []).map((term, place): Column =>
      ({ key: `term-${term}`, title: term, number: true, value: (row) => row.terms[place] ?? null }));
    return [
      { key: "place", title: "#", number: true, value: (row) => row.place },
      { key: "step", title: "step", number: true, value: () => shown.step },
      { key: "prompt", title: "prompt", number: false, value: (row) => row.prompt },
      { key: "response", title: "response", number: false, value: (row) => row.response },
      ...terms,
      { key: "reward", title: "reward", number: true, value: (row) => row.reward },
      { key: "length", title: "length", number: true, value: (row) => row.length },
      { key: "finish", title: "finish", number: false, value: (row) => row.finish },
    ];
  }

  private heading(column: Column): HTMLElement {
    const active = this.sortKey === column.key;
    const order = !active ? "none" : this.descending ? "descending" : "ascending";
    const sign = !active || column.key === "place" ? "" : this.descending ? " ▾" : " ▴";
    const button = h("button", { type: "button", class: "rlk-sort", "data-key": column.key }, column.title + sign);
    button.addEventListener("click", () => {
      this.descending = active ? !this.descending : column.number && column.key !== "place";
      this.sortKey = column.key;
      this.draw();
      this.head.querySelector<HTMLElement>(`[data-key="${CSS.escape(column.key)}"]`)?.focus({ preventScroll: true });
    });
    return h("th", { scope: "col", "aria-sort": order, class: column.number ? "rlk-right" : null }, button);
  }

  private sorted(rows: RolloutRow[], columns: Column[]): RolloutRow[] {
    const column = columns.find(({ key }) => key === this.sortKey) ?? columns[0]!;
    const sign = this.descending ? -1 : 1;
    return [...rows].sort((a, b) => {
      const [left, right] = [column.value(a), column.value(b)];
      if (left === null || right === null) return left === right ? a.place - b.place : left === null ? 1 : -1;
      return sign * (left < right ? -1 : left > right ? 1 : 0) || a.place - b.place;
    });
  }

  private row(shown: Rollouts, row: RolloutRow, columns: Column[], scale: number): HTMLElement {
    const key = `${shown.step}/${row.place}`;
    const isOpen = this.open.has(key);
    const full = isOpen ? this.store.texts.get(key) : undefined;
    const cells = columns.map((column) => {
      if (column.key === "place") return h("td", { class: "rlk-right" }, this.opener(shown, row, key, isOpen));
      const value = column.value(row);
      if (!column.number) {
        const text = full && (column.key === "prompt" || column.key === "response") ? full[column.key] : undefined;
        return h("td", { class: `rlk-text-${column.key}` }, h("div", { class: "rlk-cell" }, text ?? full?.error ?? String(value ?? "")));
      }
      const whole = column.key === "length" || column.key === "step";
      const cell = h("td", { class: "rlk-right" }, whole ? String(value ?? "–") : compact(value as number | null));
      if (column.key === "reward" && row.reward !== null) {
        cell.classList.add("rlk-bar", row.reward < 0 ? "rlk-negative" : "rlk-positive");
        cell.style.setProperty("--rlk-share", `${(100 * Math.abs(row.reward)) / scale}%`);
      }
      return cell;
    });
    return h("tr", { class: isOpen ? "rlk-open" : null }, ...cells);
  }

  private opener(shown: Rollouts, row: RolloutRow, key: string, isOpen: boolean): HTMLElement {
    const button = h("button", {
      type: "button", class: "rlk-sort", "aria-expanded": String(isOpen), "data-open": key,
      "aria-label": `Rollout ${row.place}: ${isOpen ? "shorten" : "show in full"}`,
    }, `${isOpen ? "▾" : "▸"} ${row.place}`);
    button.addEventListener("click", () => {
      if (isOpen) this.open.delete(key);
      else this.open.add(key);
      if (!isOpen && row.cut && shown.step !== null && !this.store.texts.has(key)) {
        this.store.send({ kind: "rollout", step: shown.step, place: row.place });
      }
      this.draw();
      this.body.querySelector<HTMLElement>(`[data-open="${key}"]`)?.focus({ preventScroll: true });
    });
    return button;
  }
}
