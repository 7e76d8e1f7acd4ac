"""The lines of events.jsonl: one function per type, so that writer and readers agree.

Every event has "type" (always the first key, so that a reader can skip a line without parsing it) and "time" (unix
seconds). The driver is the only writer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rlkit.runs.protocol import RunState, Span, StepMetrics

Event = dict[str, Any]
Answer = Literal["applied", "refused"]


def _event(type_: str, **fields: Any) -> Event:
    return {"type": type_, "time": time.time(), **fields}


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numbers out of numpy or 0-d tensors, tuples as lists, non-finite numbers as text."""
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if callable(getattr(value, "item", None)) and getattr(value, "size", None) is not None:
        try:
            return plain(value.item())
        except (TypeError, ValueError, RuntimeError):
            return str(value)
    return str(value)


def metrics(step_metrics: StepMetrics) -> Event:
    """{"step", "metrics": {name: number or null}}, and "nonfinite": {name: "nan" | "inf" | "-inf"} where null."""
    values: dict[str, float | None] = dict(step_metrics.metrics)
    nonfinite = {name: str(float(value)) for name, value in step_metrics.metrics.items() if not math.isfinite(value)}
    event = _event("metrics", step=step_metrics.step, metrics=values)
    if nonfinite:
        values.update(dict.fromkeys(nonfinite))
        event["nonfinite"] = nonfinite
    return event


def spans(step: int, items: Iterable[Span]) -> Event:
    """{"step", "spans": [{"name", "start", "duration_s", "rank"}]}."""
    rows = [{"name": s.name, "start": s.start, "duration_s": s.duration_s, "rank": s.rank} for s in items]
    return _event("spans", step=step, spans=rows)


def rollouts(step: int, path: str, rows: int) -> Event:
    """{"step", "path" (relative to the run folder), "rows"}."""
    return _event("rollouts", step=step, path=path, rows=rows)


def checkpoint(step: int, path: str) -> Event:
    """{"step", "path" (relative to the run folder)}; written once the checkpoint is complete on disk."""
    return _event("checkpoint", step=step, path=path)


def state(name: RunState, step: int, reason: str = "") -> Event:
    """{"state", "step", "reason"}."""
    return _event("state", state=name, step=step, reason=reason)


def error(step: int, message: str, traceback: str) -> Event:
    """{"step", "message", "traceback"}."""
    return _event("error", step=step, message=message, traceback=traceback)


def request(
    id_: str,
    kind: str,
    args: Any,
    status: Answer,
    step: int,
    reason: str = "",
    source: str = "",
) -> Event:
    """The one answer to a request: {"id", "kind", "args", "status", "step", "reason", "source"}."""
    return _event(
        "request", id=id_, kind=kind, args=plain(args), status=status, step=step, reason=reason, source=source
    )


def settings(step: int, values: Mapping[str, Any]) -> Event:
    """{"step", "settings": {name: value}}: at the start and after each applied change."""
    return _event("settings", step=step, settings=plain(values))


def type_of(line: bytes) -> str | None:
    """The type of a raw line without parsing all of it; None when it does not begin as an event does."""
    prefix = b'{"type":"'
    if not line.startswith(prefix):
        return None
    end = line.find(b'"', len(prefix))
    return line[len(prefix) : end].decode("utf-8", "replace") if end > 0 else None
