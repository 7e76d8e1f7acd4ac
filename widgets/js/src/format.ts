// Numbers and words as people read them.

import type { RequestNote } from "./protocol";

/** A number in at most about seven characters. */
export function compact(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e9 || size < 1e-4) return value.toExponential(1).replace("e+", "e").replace("-", "−");
  if (size >= 1e6) return signed(value / 1e6, 2) + "M";
  if (size >= 1e4) return signed(value / 1e3, 1) + "k";
  if (size >= 100) return signed(value, size >= 1000 ? 0 : 1);
  return signed(value, size >= 10 ? 2 : size >= 0.01 ? 3 : 5);
}

/** A number on an axis: as short as it can be. */
export function tickText(value: number): string {
  const text = compact(Number(value.toPrecision(6)));
  return text.includes("e") ? text.replace(/\.0e/, "e") : text.replace(/(\.\d*?)0+(?=[kM]?$)/, "$1").replace(/\.(?=[kM]?$)/, "");
}

function signed(value: number, digits: number): string {
  return value.toFixed(digits).replace("-", "−");
}

/** A setting's value as it is typed: the shortest that means the same number. */
export function exact(value: number): string {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential().replace("e+", "e") : String(value);
}

export function duration(seconds: number): string {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 90 * 60) return `${Math.round(seconds / 60)} min`;
  const hours = seconds / 3600;
  return hours < 48 ? `${hours.toFixed(1)} h` : `${(hours / 24).toFixed(1)} days`;
}

/** Area of a metric (before its first slash) and the rest of its name. */
export function splitName(name: string): [area: string, rest: string] {
  const slash = name.indexOf("/");
  return slash > 0 ? [name.slice(0, slash), name.slice(slash + 1)] : ["", name];
}

/** Where a request stands, e.g. "applied at step 12". */
export function standing(note: RequestNote): string {
  if (note.status === "pending") return "pending";
  if (note.status === "applied") return `applied at step ${note.step}`;
  return `refused: ${note.reason || "no reason given"}`;
}

/** What a request asks for, e.g. "brevity = 0.3" or "pause". */
export function asked(note: RequestNote): string {
  if (note.kind === "step") return `step ${(note.args["n"] as number | undefined) ?? 1}`;
  if (note.kind !== "set") return note.kind;
  return Object.entries(note.args)
    .map(([name, value]) =>
      name === "reward_weights" && value !== null && typeof value === "object"
        ? Object.entries(value).map(([term, weight]) => `${term} = ${shown(weight)}`).join(", ")
        : `${name} = ${shown(value)}`,
    )
    .join(", ");
}

function shown(value: unknown): string {
  if (typeof value === "number") return exact(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
