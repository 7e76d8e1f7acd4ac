// One uPlot chart in the theme's colours: several lines over steps, requests as upright marks, a shared cursor.

import uPlot from "uplot";
import { tickText } from "./format";
import { type Ink, inkOf, seriesColor, seriesDash } from "./theme";

export interface Line {
  name: string;
  /** Place in the palette; null draws in the colour of the text, for a total. */
  color: number | null;
}

export interface Mark {
  step: number;
  text: string;
}

const STEP_INCREMENTS = [1, 2, 5].flatMap((base) => Array.from({ length: 9 }, (_, power) => base * 10 ** power))
  .sort((a, b) => a - b);

export class Chart {
  readonly plot: uPlot;
  private ink: Ink;

  constructor(
    private readonly host: HTMLElement,
    readonly lines: Line[],
    data: uPlot.AlignedData,
    private readonly height: number,
    private readonly marks: () => Mark[],
    onCursor: (step: number | null) => void,
    syncKey: string,
  ) {
    this.ink = inkOf(host);
    this.plot = new uPlot(this.options(onCursor, syncKey), data, host);
  }

  setData(data: uPlot.AlignedData): void {
    this.plot.setData(data);
  }

  /** Fit the host's width; a host that is not laid out keeps the last one. */
  resize(): void {
    const width = Math.floor(this.host.clientWidth);
    if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }

  repaint(): void {
    this.ink = inkOf(this.host);
    this.plot.redraw(false, true);
  }

  destroy(): void {
    this.plot.destroy();
  }

  private options(onCursor: (step: number | null) => void, syncKey: string): uPlot.Options {
    const font = "10px system-ui, sans-serif";
    const axis = {
      stroke: () => this.ink.faint, font, gap: 3,
      grid: { stroke: () => this.ink.grid, width: 1 }, ticks: { show: false },
    };
    return {
      width: Math.max(120, Math.floor(this.host.clientWidth)),
      height: this.height,
      padding: [6, 8, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { setScale: false, x: false, y: false }, points: { size: 5 }, sync: { key: syncKey } },
      scales: {
        x: { time: false, range: (_u, low, high) => (high > low ? [low, high] : [low - 1, high + 1]) },
        y: { range: (_u, low, high) => spread(low, high) },
      },
      axes: [
        { ...axis, size: 18, space: 46, incrs: STEP_INCREMENTS, values: (_u, ticks) => ticks.map(String) },
        { ...axis, size: 44, space: 20, values: (_u, ticks) => ticks.map(tickText) },
      ],
      series: [{}, ...this.lines.map((line) => this.seriesOptions(line))],
      hooks: {
        drawAxes: [() => this.drawMarks()],
        setCursor: [(plot) => {
          const place = plot.cursor.idx;
          const inside = plot.cursor.left !== undefined && plot.cursor.left >= 0;
          onCursor(inside && place != null ? (plot.data[0]![place] as number) : null);
        }],
      },
    };
  }

  private seriesOptions(line: Line): uPlot.Series {
    const stroke = () => (line.color === null ? this.ink.text : seriesColor(line.color, this.ink.dark));
    return {
      label: line.name, stroke, width: line.color === null ? 2 : 1.5,
      dash: line.color === null ? [] : seriesDash(line.color), spanGaps: false,
      points: { size: 4, fill: stroke, stroke },
    };
  }

  private drawMarks(): void {
    const { ctx, bbox } = this.plot;
    const { min, max } = this.plot.scales["x"]!;
    if (min == null || max == null) return;
    ctx.save();
    ctx.strokeStyle = this.ink.faint;
    ctx.lineWidth = uPlot.pxRatio;
    ctx.setLineDash([3 * uPlot.pxRatio, 3 * uPlot.pxRatio]);
    for (const mark of this.marks()) {
      if (mark.step < min || mark.step > max) continue;
      const x = Math.round(this.plot.valToPos(mark.step, "x", true)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}

/** Range of the values with some air; a constant sits in the middle. */
function spread(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  if (low === high) {
    const half = Math.abs(low) * 0.1 || 1;
    return [low - half, high + half];
  }
  const air = (high - low) * 0.08;
  return [low - air, high + air];
}
