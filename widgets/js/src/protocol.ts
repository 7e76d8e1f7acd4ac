// The messages between page and kernel. The kernel's side is documented in rlkit_widgets/messages.py.

export type Weights = Record<string, number>;

export interface Status {
  state: string | null;
  step: number | null;
  total_steps: number | null;
  reason: string | null;
  /** Seconds since the driver's last sign of life. */
  age: number;
  /** Whether a driver is there and answers requests. */
  alive: boolean | null;
  /** Whether nobody drives the run for now, on purpose. */
  parked: boolean | null;
  step_seconds: number | null;
}

export interface SettingSpec {
  type?: string;
  min?: number | null;
  max?: number | null;
  doc?: string;
  choices?: (string | number)[];
}

export interface RequestNote {
  id: string | null;
  nonce?: string | null;
  kind: string;
  args: Record<string, unknown>;
  status: "pending" | "applied" | "refused";
  step: number | null;
  reason: string | null;
  source: string;
}

export interface RolloutRow {
  place: number;
  prompt: string;
  response: string;
  cut: boolean;
  terms: (number | null)[];
  reward: number | null;
  length: number | null;
  finish: string;
}

export interface Rollouts {
  step: number | null;
  previous: number | null;
  next: number | null;
  latest: number | null;
  total?: number;
  terms?: string[];
  rows: RolloutRow[];
  error?: string;
}

export interface RolloutText {
  step: number;
  place: number;
  prompt?: string;
  response?: string;
  error?: string;
}

interface Points {
  names?: [number, string][];
  series?: [number, number][];
}

export type KernelMessage =
  | {
      kind: "hello";
      run: string;
      folder: string;
      status: Status;
      settings: Record<string, unknown>;
      specs: Record<string, SettingSpec>;
      requests: RequestNote[];
      nonfinite: Record<string, [number, string]>;
    }
  | ({ kind: "history" } & Points)
  | ({
      kind: "tick";
      status: Status;
      settings?: Record<string, unknown>;
      specs?: Record<string, SettingSpec>;
      requests?: RequestNote[];
      nonfinite?: Record<string, [number, string]>;
    } & Points)
  | ({ kind: "rollouts" } & Rollouts)
  | ({ kind: "rollout" } & RolloutText)
  | { kind: "error"; message: string };

export type PageMessage =
  | { kind: "hello" }
  | { kind: "request"; nonce: string; request: string; args: Record<string, unknown> }
  | { kind: "rollouts"; step: number | null }
  | { kind: "rollout"; step: number; place: number };

/** What this front-end needs of an anywidget model. */
export interface Model {
  get(name: string): unknown;
  set(name: string, value: unknown): void;
  on(event: string, callback: (...args: never[]) => void): void;
  off(event: string, callback: (...args: never[]) => void): void;
  send(content: PageMessage): void;
}
