// A small helper to build elements, so that texts are set as text and never as markup.

type Attributes = Record<string, string | number | boolean | null | undefined>;

/** An element: attributes by name (false and null leave one out), then children. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children);
  return element;
}

/** Set text only when it differs: screen readers announce a live region at each write. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Remember the focused control through JupyterLab's move of the focus to the cell after a click. */
export function keepFocus(control: HTMLElement): void {
  control.addEventListener("pointerup", () => {
    window.setTimeout(() => {
      if (document.activeElement !== control && control.isConnected) control.focus({ preventScroll: true });
    }, 0);
  });
}

let counter = 0;
/** An id no other element of the page has. */
export function uniqueId(prefix: string): string {
  return `rlk-${prefix}-${++counter}-${Math.random().toString(36).slice(2, 7)}`;
}
