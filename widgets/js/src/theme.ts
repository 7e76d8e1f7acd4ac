// Colours that follow JupyterLab's theme. Series use the palette of Okabe and Ito, which colour-blind readers can tell
// apart; each theme takes the members that stand out on its paper.

const ON_LIGHT = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
const ON_DARK = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00"];
const DASHES: number[][] = [[], [5, 3], [2, 2]];

export interface Ink {
  dark: boolean;
  text: string;
  faint: string;
  grid: string;
  paper: string;
}

export function isDark(): boolean {
  const said = document.body.dataset["jpThemeLight"];
  if (said !== undefined) return said === "false";
  const kind = document.body.dataset["vscodeThemeKind"];
  if (kind !== undefined) return kind.includes("dark");
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Colours in force at `element`, for what is drawn on a canvas. */
export function inkOf(element: Element): Ink {
  const style = getComputedStyle(element);
  const read = (name: string) => style.getPropertyValue(name).trim();
  return {
    dark: isDark(),
    text: read("--rlk-text"),
    faint: read("--rlk-faint"),
    grid: read("--rlk-grid"),
    paper: read("--rlk-paper"),
  };
}

export function seriesColor(place: number, dark: boolean): string {
  const palette = dark ? ON_DARK : ON_LIGHT;
  return palette[place % palette.length]!;
}

/** Dash pattern: lines that share a colour differ in their dashes. */
export function seriesDash(place: number): number[] {
  return DASHES[Math.floor(place / ON_LIGHT.length) % DASHES.length]!;
}

/** Calls `callback` when the theme changes; returns what stops it. */
export function onThemeChange(callback: () => void): () => void {
  const observer = new MutationObserver(callback);
  observer.observe(document.body, {
    attributes: true,
    attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-kind", "class"],
  });
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", callback);
  return () => {
    observer.disconnect();
    system.removeEventListener("change", callback);
  };
}
