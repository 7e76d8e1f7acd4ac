// The widget: builds the panels that the `panels` trait names and keeps them in step with the run.

import "uplot/dist/uPlot.min.css";
import "./dashboard.css";
import { Announcer } from "./announcer";
import { ControlsPanel } from "./controls";
import { h } from "./dom";
import { MixerPanel } from "./mixer";
import { PlotsPanel } from "./plots";
import type { Model } from "./protocol";
import { RolloutsPanel } from "./rollouts";
import { StatusPanel } from "./status";
import { Store, type Topic } from "./store";

interface Panel {
  readonly element: HTMLElement;
  update(changed: ReadonlySet<Topic>): void;
  destroy?(): void;
}

const EVERYTHING: ReadonlySet<Topic> = new Set<Topic>(["status", "settings", "requests", "points", "rollouts", "link"]);
const PANELS: [string, (store: Store) => Panel][] = [
  ["status", (store) => new StatusPanel(store)],
  ["controls", (store) => new ControlsPanel(store)],
  ["mixer", (store) => new MixerPanel(store)],
  ["plots", (store) => new PlotsPanel(store)],
  ["rollouts", (store) => new RolloutsPanel(store)],
];

/** One store a widget, however often it is shown. anywidget hands out a new stand-in for the model at each call, so the
 * widget is known by its snapshot's id. */
const stores = new Map<string, Store>();

function idOf(model: Model): string {
  return String(model.get("snapshot_id"));
}

function storeOf(model: Model): Store {
  const id = idOf(model);
  let store = stores.get(id);
  if (!store) stores.set(id, (store = new Store(model)));
  return store;
}

/** JupyterLab's shortcuts would take arrow keys and letters typed into the controls; keys with Ctrl and the like pass. */
function guardKeys(root: HTMLElement): void {
  root.setAttribute("data-lm-suppress-shortcuts", "true");
  root.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && event.key !== "Escape") event.stopPropagation();
  });
}

/** The static view of a saved notebook steps aside while a live one is shown. */
function hideSnapshot(model: Model): () => void {
  const id = CSS.escape(idOf(model));
  const style = h("style", {}, `[data-rlkit-snapshot="${id}"] { display: none; }`);
  document.head.append(style);
  return () => style.remove();
}

/** Controls and mixer stand in a column beside the plots; the rest goes over the whole width. */
function layOut(made: [string, Panel][]): HTMLElement[] {
  const elements = new Map(made.map(([name, panel]) => [name, panel.element]));
  const side = ["mixer", "controls"].flatMap((name) => elements.get(name) ?? []);
  const plots = elements.get("plots");
  const middle = plots && side.length > 0
    ? [h("div", { class: "rlk-columns" }, h("div", { class: "rlk-side" }, ...side), plots)]
    : [...side, ...(plots ? [plots] : [])];
  return [...[elements.get("status") ?? []].flat(), ...middle, ...[elements.get("rollouts") ?? []].flat()];
}

function initialize({ model }: { model: Model }): () => void {
  const store = storeOf(model);
  return () => {
    store.destroy();
    stores.delete(idOf(model));
  };
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const store = storeOf(model);
  const wanted = model.get("panels") as string[];
  const made = PANELS.filter(([name]) => wanted.includes(name)).map(([name, make]): [string, Panel] => [name, make(store)]);
  const panels = made.map(([, panel]) => panel);
  const announcer = new Announcer(store);
  const root = h("div", { class: "rlk", "data-rlkit": "root", "data-panels": wanted.join(" ") },
    ...layOut(made), announcer.element);
  guardKeys(root);
  el.append(root);
  const update = (changed: ReadonlySet<Topic>) => {
    for (const panel of panels) panel.update(changed);
    announcer.update(changed);
    root.dataset["linked"] = store.linked ? "yes" : "no";
  };
  const unsubscribe = store.subscribe(update);
  update(EVERYTHING);
  const showSnapshot = hideSnapshot(model);
  return () => {
    unsubscribe();
    showSnapshot();
    for (const panel of panels) panel.destroy?.();
    root.remove();
  };
}

export default { initialize, render };
