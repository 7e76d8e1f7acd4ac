// Points of one metric in the page: bounded, thinned so that peaks and dips stay.

const KEPT = 4000;

export class Series {
  steps: number[] = [];
  values: (number | null)[] = [];

  constructor(readonly name: string) {}

  /** Add points; a step seen before replaces it and all after it, as in the kernel. */
  push(step: number, value: number): void {
    while (this.steps.length > 0 && this.steps[this.steps.length - 1]! >= step) {
      this.steps.pop();
      this.values.pop();
    }
    this.steps.push(step);
    this.values.push(Number.isFinite(value) ? value : null);
    if (this.steps.length > KEPT) this.thin(KEPT / 2);
  }

  get last(): number | null {
    return this.values.length > 0 ? this.values[this.values.length - 1]! : null;
  }

  get lastStep(): number | null {
    return this.steps.length > 0 ? this.steps[this.steps.length - 1]! : null;
  }

  /** Value at the newest step not after `step`. */
  at(step: number): number | null {
    let low = 0;
    let high = this.steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle]! <= step) low = middle + 1;
      else high = middle;
    }
    return low > 0 ? this.values[low - 1]! : null;
  }

  private thin(limit: number): void {
    const count = this.steps.length;
    const size = Math.ceil(count / ((limit - 2) / 2));
    const chosen = new Set<number>([0, count - 1]);
    for (let start = 0; start < count; start += size) {
      let lowest = start;
      let highest = start;
      for (let place = start; place < Math.min(start + size, count); place++) {
        const value = this.values[place] ?? null;
        if (value === null) continue;
        if (this.values[lowest] == null || value < this.values[lowest]!) lowest = place;
        if (this.values[highest] == null || value > this.values[highest]!) highest = place;
      }
      chosen.add(lowest).add(highest);
    }
    const places = [...chosen].sort((a, b) => a - b);
    this.steps = places.map((place) => this.steps[place]!);
    this.values = places.map((place) => this.values[place]!);
  }
}
