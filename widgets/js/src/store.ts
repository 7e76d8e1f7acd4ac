// What the page knows of the run. Messages change it at once; views hear of it once per animation frame.

import type {
  KernelMessage, Model, PageMessage, RequestNote, Rollouts, RolloutText, SettingSpec, Status,
} from "./protocol";
import { revive } from "./revive";
import { Series } from "./series";

export type Topic = "status" | "settings" | "requests" | "points" | "rollouts" | "link";
export type Listener = (changed: ReadonlySet<Topic>) => void;

const SILENCE_MS = 7000;
const HELLO_AGAIN_MS = 3000;
const NOTES_KEPT = 60;

export class Store {
  run: string;
  folder = "";
  status: Status = {
    state: null, step: null, total_steps: null, reason: null, age: 0, alive: null, parked: null,
    step_seconds: null,
  };
  settings: Record<string, unknown> = {};
  specs: Record<string, SettingSpec> = {};
  readonly series = new Map<string, Series>();
  nonfinite: Record<string, [number, string]> = {};
  /** Latest requests, oldest first; the same object changes from pending to its answer. */
  notes: RequestNote[] = [];
  rollouts: Rollouts | null = null;
  readonly texts = new Map<string, RolloutText>();
  error: string | null = null;
  /** Whether the kernel was heard of lately. */
  linked = false;

  private readonly names = new Map<number, string>();
  private readonly listeners = new Set<Listener>();
  private readonly changed = new Set<Topic>();
  private frame = 0;
  private silence = 0;
  private greeting = 0;
  private nonces = 0;
  private readonly session = Math.random().toString(36).slice(2, 10);

  constructor(private readonly model: Model) {
    this.run = String(model.get("run_name") ?? "");
    model.on("msg:custom", this.receive);
    this.greet();
  }

  get weights(): Record<string, number> {
    return (this.settings["reward_weights"] ?? {}) as Record<string, number>;
  }

  /** Whether the run can still be asked for something. */
  get open(): boolean {
    return this.linked && this.status.alive === true && this.status.state !== "stopping";
  }

  subscribe(listener: Listener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Ask the run for something; the note turns from pending into the answer. */
  request(kind: string, args: Record<string, unknown> = {}): RequestNote {
    const nonce = `${this.session}-${++this.nonces}`;
    const note: RequestNote = {
      id: null, nonce, kind, args, status: "pending", step: null, reason: null, source: "widget",
    };
    this.notes.push(note);
    this.send({ kind: "request", nonce, request: kind, args });
    this.mark("requests");
    return note;
  }

  send(message: PageMessage): void {
    this.model.send(message);
  }

  /** Ask for everything, until the kernel is heard of. */
  private greet(): void {
    try {
      this.send({ kind: "hello" });
    } catch (error) {
      console.warn("rlkit: the kernel could not be asked", error);
    }
    this.greeting = window.setTimeout(() => {
      revive(this.model);
      this.greet();
    }, HELLO_AGAIN_MS);
  }

  destroy(): void {
    window.clearTimeout(this.greeting);
    this.model.off("msg:custom", this.receive);
    window.clearTimeout(this.silence);
    cancelAnimationFrame(this.frame);
    this.listeners.clear();
  }

  private readonly receive = (message: KernelMessage, buffers: DataView[]): void => {
    this.heard();
    switch (message.kind) {
      case "hello":
        this.run = message.run;
        this.folder = message.folder;
        this.series.clear();
        this.names.clear();
        this.error = null;
        this.adopt(message);
        this.mark("points");
        break;
      case "history":
      case "tick":
        if (message.kind === "tick") {
          this.error = null;
          this.adopt(message);
        }
        this.addPoints(message, buffers);
        break;
      case "rollouts":
        this.rollouts = message;
        this.mark("rollouts");
        break;
      case "rollout":
        this.texts.set(`${message.step}/${message.place}`, message);
        this.mark("rollouts");
        break;
      case "error":
        this.error = message.message;
        this.mark("link");
        break;
    }
  };

  private adopt(message: Extract<KernelMessage, { kind: "hello" | "tick" }>): void {
    this.status = message.status;
    this.mark("status");
    if (message.settings) {
      this.settings = message.settings;
      this.specs = message.specs ?? this.specs;
      this.mark("settings");
    }
    if (message.nonfinite) this.nonfinite = message.nonfinite;
    for (const note of message.requests ?? []) this.answer(note);
  }

  private answer(fresh: RequestNote): void {
    const known = this.notes.find(
      (note) => (fresh.nonce != null && note.nonce === fresh.nonce) || (fresh.id !== null && note.id === fresh.id),
    );
    if (known) {
      if (known.status === "pending") {
        Object.assign(known, fresh, { nonce: known.nonce });
        if (fresh.status === "applied" && known.kind === "set") this.foresee(known.args);
      }
    } else {
      this.notes.push(fresh);
    }
    if (this.notes.length > NOTES_KEPT) this.notes = this.notes.slice(-NOTES_KEPT);
    this.mark("requests");
  }

  /** An applied change may be told before the settings that hold it: show it at once, without a step back. */
  private foresee(args: Record<string, unknown>): void {
    const weights = { ...this.weights, ...((args["reward_weights"] ?? {}) as Record<string, number>) };
    this.settings = { ...this.settings, ...args };
    if (Object.keys(weights).length > 0) this.settings["reward_weights"] = weights;
    this.mark("settings");
  }

  private addPoints(message: { names?: [number, string][]; series?: [number, number][] }, buffers: DataView[]): void {
    for (const [id, name] of message.names ?? []) this.names.set(id, name);
    const [stepBytes, valueBytes] = buffers ?? [];
    if (!message.series || !stepBytes || !valueBytes) return;
    let place = 0;
    for (const [id, count] of message.series) {
      const name = this.names.get(id);
      const series = name === undefined ? undefined : this.seriesOf(name);
      for (let end = place + count; place < end; place++) {
        series?.push(stepBytes.getFloat64(place * 8, true), valueBytes.getFloat32(place * 4, true));
      }
    }
    this.mark("points");
  }

  private seriesOf(name: string): Series {
    let series = this.series.get(name);
    if (!series) this.series.set(name, (series = new Series(name)));
    return series;
  }

  private heard(): void {
    window.clearTimeout(this.greeting);
    window.clearTimeout(this.silence);
    this.silence = window.setTimeout(() => {
      this.linked = false;
      this.mark("link");
    }, SILENCE_MS);
    if (!this.linked) {
      this.linked = true;
      this.mark("link");
    }
  }

  private mark(topic: Topic): void {
    this.changed.add(topic);
    if (this.frame === 0) this.frame = requestAnimationFrame(this.flush);
  }

  private readonly flush = (): void => {
    this.frame = 0;
    const changed = new Set(this.changed);
    this.changed.clear();
    for (const listener of this.listeners) listener(changed);
  };
}
