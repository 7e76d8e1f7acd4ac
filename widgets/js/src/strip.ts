// One strip: a title with the newest value (or the one under the cursor) above a small chart. A strip may hold several
// lines, as the rewards do; then each line has its own entry in the title.

import uPlot from "uplot";
import { Chart, type Line, type Mark } from "./chart";
import { h, setText } from "./dom";
import { compact, splitName } from "./format";
import type { Series } from "./series";
import type { Store } from "./store";
import { isDark, seriesColor, seriesDash } from "./theme";

interface Entry {
  line: Line;
  element: HTMLElement;
  swatch: HTMLElement | null;
  value: HTMLElement;
}

export interface StripOptions {
  /** For the selector and the label: the metric's name, or that of the group of lines. */
  key: string;
  height: number;
  wide: boolean;
  syncKey: string;
  marks: () => Mark[];
  observer: IntersectionObserver;
  onCursor: (step: number | null) => void;
}

export class Strip {
  readonly element: HTMLElement;
  private readonly title = h("div", { class: "rlk-strip-title" });
  private readonly host = h("div", { class: "rlk-chart", role: "img" });
  private entries: Entry[] = [];
  private chart: Chart | null = null;
  private visible = false;
  private dirty = true;
  private cursorStep: number | null = null;

  constructor(private readonly store: Store, private readonly options: StripOptions) {
    this.element = h("figure", {
      class: options.wide ? "rlk-strip rlk-wide" : "rlk-strip",
      "data-rlkit": options.wide ? `plots-${options.key}` : `plot-${options.key}`,
    }, this.title, this.host);
    this.host.style.height = `${options.height}px`;
    options.observer.observe(this.element);
  }

  /** The lines to draw; a new one rebuilds the chart. */
  setLines(lines: Line[]): void {
    const same = lines.length === this.entries.length
      && lines.every((line, place) => line.name === this.entries[place]!.line.name);
    if (same) return;
    this.dropChart();
    this.entries = lines.map((line) => this.makeEntry(line));
    this.title.replaceChildren(...this.entries.map((entry) => entry.element));
    this.touch();
  }

  /** New points: titles at once, the chart when it can be seen. */
  touch(): void {
    this.dirty = true;
    this.showValues();
    this.draw();
  }

  setVisible(visible: boolean): void {
    this.visible = visible;
    this.draw();
  }

  resize(): void {
    if (this.visible) this.chart?.resize();
  }

  repaint(): void {
    this.paintSwatches();
    this.chart?.repaint();
  }

  destroy(): void {
    this.options.observer.unobserve(this.element);
    this.dropChart();
  }

  private dropChart(): void {
    this.chart?.destroy();
    this.chart = null;
  }

  private makeEntry(line: Line): Entry {
    const { wide } = this.options;
    const [, rest] = splitName(line.name);
    const value = h("span", { class: "rlk-value" });
    const swatch = wide ? h("span", { class: "rlk-key", "aria-hidden": "true" }) : null;
    const element = h("span", { class: "rlk-entry", title: line.name, "data-rlkit": wide ? `plot-${line.name}` : null },
      ...(swatch ? [swatch] : []), h("span", { class: "rlk-clip" }, rest), value);
    const entry = { line, element, swatch, value };
    this.paintSwatch(entry);
    return entry;
  }

  private paintSwatches(): void {
    this.entries.forEach((entry) => this.paintSwatch(entry));
  }

  private paintSwatch({ line, swatch }: Entry): void {
    if (!swatch) return;
    swatch.style.borderTopColor = line.color === null ? "var(--rlk-text)" : seriesColor(line.color, isDark());
    swatch.style.borderTopStyle = line.color !== null && seriesDash(line.color).length > 0 ? "dashed" : "solid";
  }

  private seriesOf(entry: Entry): Series | undefined {
    return this.store.series.get(entry.line.name);
  }

  private showValues(): void {
    const described: string[] = [];
    for (const entry of this.entries) {
      const series = this.seriesOf(entry);
      if (!series) continue;
      const value = this.cursorStep === null ? series.last : series.at(this.cursorStep);
      setText(entry.value, value === null && series.steps.length > 0 ? this.notFinite(series) : compact(value));
      const holder = this.options.wide ? entry.element : this.element;
      holder.dataset["points"] = String(series.steps.length);
      holder.dataset["lastStep"] = String(series.lastStep ?? "");
      described.push(`${series.name} ${compact(series.last)} at step ${series.lastStep ?? 0}`);
    }
    this.element.classList.toggle("rlk-hovered", this.cursorStep !== null);
    this.host.setAttribute("aria-label", `Chart. ${described.join("; ")}`);
  }

  private notFinite(series: Series): string {
    const [step, kind] = this.store.nonfinite[series.name] ?? [null, "–"];
    return step === series.lastStep ? kind : "–";
  }

  private draw(): void {
    if (!this.visible || !this.dirty || this.entries.length === 0) return;
    this.dirty = false;
    const data = this.data();
    if (this.chart) {
      this.chart.setData(data);
      return;
    }
    const { height, marks, syncKey } = this.options;
    const lines = this.entries.map((entry) => entry.line);
    this.chart = new Chart(this.host, lines, data, height, marks, (step) => this.showCursor(step), syncKey);
  }

  private showCursor(step: number | null): void {
    if (step === this.cursorStep) return;
    this.cursorStep = step;
    this.options.onCursor(step);
    this.showValues();
  }

  private data(): uPlot.AlignedData {
    const tables = this.entries.map((entry) => this.seriesOf(entry)).map(
      (series) => [series?.steps ?? [], series?.values ?? []] as uPlot.AlignedData);
    if (tables.length === 1) return tables[0]!;
    const first = tables[0]![0];
    const aligned = tables.every(([steps]) => steps.length === first.length && steps.every((step, i) => step === first[i]));
    return aligned ? ([first, ...tables.map((table) => table[1]!)] as uPlot.AlignedData) : uPlot.join(tables);
  }
}
