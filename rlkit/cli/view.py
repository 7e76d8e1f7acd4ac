"""What a terminal shows of a run, kept up to date from its folder."""

import fnmatch
import math
import os
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit.errors import RunError
from rlkit.runs.reader import RunReader

# Shown first, in this order, where a run has them; the rest follow.
KEY_METRICS = (
    "reward/mean",
    "kl/per_token",
    "kl/*",
    "rollout/response_length",
    "rollout/throughput_tokens_per_sec",
    "*entropy*",
    "*policy_loss*",
    "*loss*",
    "rollout/repeated_bigram_fraction",
    "train/grad_norm",
    "train/step_time_ms",
    "*",
)
_NOT_PLOTTED = ("memory/*", "reward/latency_ms")
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass
class Series:
    """One metric over the steps that reported it."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Add a point; a step that is reported again (after a resume) replaces what came from it on."""
        if self.steps and step <= self.steps[-1]:
            cut = bisect_left(self.steps, step)
            del self.steps[cut:], self.values[cut:]
        self.steps.append(step)
        self.values.append(value)

    @property
    def last(self) -> float:
        return self.values[-1] if self.values else math.nan


class RunView:
    """A run as its folder tells it. `update` reads what is new; everything else is plain data to draw.

    Raises RunError when the folder is not a run.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.reader = RunReader(directory)
        self.name = self.reader.folder.name
        self.config = self.reader.config()
        self.series: dict[str, Series] = {}
        self.spans: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        self.requests: deque[dict[str, Any]] = deque(maxlen=200)
        self.error: dict[str, Any] | None = None
        self.checkpoint: dict[str, Any] | None = None
        self.status: dict[str, Any] = {}
        self._rollouts_step: int | None = None
        self._samples: tuple[int, list[dict[str, Any]]] | None = None
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "metrics": self._on_metrics,
            "spans": self._on_spans,
            "settings": self._on_settings,
            "rollouts": self._on_rollouts,
            "request": self.requests.append,
            "error": self._on_error,
            "checkpoint": self._on_checkpoint,
        }
        self.update()

    def update(self) -> list[dict[str, Any]]:
        """Read the status and the new events; returns those events."""
        self.status = self.reader.live_status()
        events = self.reader.poll()
        for event in events:
            if handler := self._handlers.get(event.get("type", "")):
                handler(event)
        if isinstance(self.status.get("settings"), dict):
            self.settings = self.status["settings"]
        return events

    # Facts

    @property
    def state(self) -> str:
        """The state as it is now: "failed" when the process that drove the run has died."""
        return str(self.status.get("state", "unknown"))

    @property
    def alive(self) -> bool:
        """Whether a driver is there and answers requests."""
        return bool(self.status.get("alive"))

    @property
    def step(self) -> int:
        return int(self.status.get("step") or 0)

    @property
    def total_steps(self) -> int | None:
        total = self.status.get("total_steps")
        return int(total) if total else None

    @property
    def seconds_per_step(self) -> float | None:
        """Mean of the last ten step times, in seconds; None before the first."""
        times = self.series.get("train/step_time_ms")
        recent = [v for v in times.values[-10:] if math.isfinite(v)] if times else []
        return sum(recent) / len(recent) / 1e3 if recent else None

    @property
    def remaining(self) -> float | None:
        """Seconds until the last step at the present pace; None when that cannot be said."""
        pace, total = self.seconds_per_step, self.total_steps
        if pace is None or total is None or not self.alive:
            return None
        return max(0, total - self.step) * pace

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward term."""
        weights = self.settings.get("reward_weights")
        return weights if isinstance(weights, dict) else {}

    def key_metrics(self, patterns: Sequence[str] = ()) -> list[str]:
        """Names of the metrics worth plotting, most telling first; with `patterns`, those that match, in that order."""
        terms = {f"reward/{term}" for term in self.weights}
        names = list(self.series)
        if not patterns:
            hidden = terms | {name for name in names if any(fnmatch.fnmatchcase(name, p) for p in _NOT_PLOTTED)}
            names = [name for name in names if name not in hidden]
        ordered: dict[str, None] = {}
        for pattern in patterns or KEY_METRICS:
            ordered.update(dict.fromkeys(fnmatch.filter(names, pattern)))
        return list(ordered)

    def samples(self) -> tuple[int, list[dict[str, Any]]] | None:
        """The latest recorded step and its rollouts, best reward first; None while there are none."""
        step = self._rollouts_step
        if step is None or (self._samples is not None and self._samples[0] == step):
            return self._samples
        try:
            frame = self.reader.rollouts(step)
        except (RunError, OSError):
            return self._samples
        if "reward" in frame:
            frame = frame.sort_values("reward", ascending=False, na_position="last", kind="stable")
        rows = [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
        self._samples = (step, rows)
        return self._samples

    # Events

    def _on_metrics(self, event: dict[str, Any]) -> None:
        nonfinite = event.get("nonfinite", {})
        for name, value in event.get("metrics", {}).items():
            known = _NONFINITE.get(nonfinite.get(name, ""), math.nan) if value is None else float(value)
            self.series.setdefault(name, Series()).add(int(event["step"]), known)

    def _on_spans(self, event: dict[str, Any]) -> None:
        self.spans = event.get("spans", [])

    def _on_settings(self, event: dict[str, Any]) -> None:
        self.settings = event.get("settings", {})

    def _on_rollouts(self, event: dict[str, Any]) -> None:
        self._rollouts_step = int(event["step"])

    def _on_error(self, event: dict[str, Any]) -> None:
        self.error = event

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        self.checkpoint = event
