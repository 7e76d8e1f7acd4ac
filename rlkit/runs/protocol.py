"""What passes between a trainer and the process that drives it. Imports nothing heavy.

Units: times are unix seconds, durations are seconds. Shapes: B rollouts in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

RunState = Literal["starting", "running", "paused", "stopping", "stopped", "finished", "failed"]
RequestKind = Literal["pause", "resume", "step", "stop", "set", "checkpoint"]
RequestSource = Literal["python", "widget", "cli"]

LIVE_STATES: frozenset[str] = frozenset({"starting", "running", "paused", "stopping"})
REQUEST_KINDS: tuple[str, ...] = get_args(RequestKind)
REQUEST_SOURCES: tuple[str, ...] = get_args(RequestSource)

_SHOWN_OF_PAIRS = ("preferences/loss", "preferences/accuracy", "preferences/margin")
"""Metrics of pairs that a step names in its text, beside the rewards."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work inside a step, for the timeline."""

    name: str
    """The stage, usually the controller's name."""
    start: float
    """Unix time in seconds at which the work began."""
    duration_s: float
    """How long it took, in seconds, on a monotonic clock."""
    rank: int = 0
    """The worker that did it; 0 on one device."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The reduced metrics of one step: plain numbers, no tensors."""

    step: int
    metrics: dict[str, float]
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What `Trainable.step` hands back."""

    step: int
    """Number of steps completed, this one included."""
    metrics: dict[str, float]
    """Reduced metrics, `area/name` with a unit suffix, plain numbers."""
    spans: list[Span] = field(default_factory=list)
    rollouts: dict[str, list[Any]] = field(default_factory=dict)
    """Columns -> one entry per rollout (B each): row, group, prompt, response, reward, reward/<term>, ..."""

    def __repr__(self) -> str:
        shown = {
            name: f"{value:.4g}"
            for name, value in self.metrics.items()
            if name.startswith(("reward/", "kl/")) or name in _SHOWN_OF_PAIRS
        }
        metrics = ", ".join(f"{name} {value}" for name, value in shown.items())
        return f"<step {self.step}: {metrics}; {len(self.metrics)} metrics, {rollout_count(self.rollouts)} rollouts>"


@runtime_checkable
class Trainable(Protocol):
    """What a run drives. Trainers implement it; tests use a tiny one.

    `state_dict` and `frozen_state_dict` return nested dicts (also lists and tuples) whose leaves are tensors or
    JSON values (str, int, float, bool, None). Together they hold every tensor that training changes or needs.
    """

    global_step: int

    def step(self) -> StepResult:
        """Take one optimizer iteration."""
        ...

    def settings(self) -> dict[str, Any]:
        """Live settings and their values, e.g. {"lr": 1e-6, "reward_weights": {"brevity": 0.5}}."""
        ...

    def setting_specs(self) -> Mapping[str, Mapping[str, Any]]:
        """Per live setting {"type", "min", "max", "doc"}."""
        ...

    def set(self, **changes: Any) -> None:
        """Change live settings, all or none; RlkitError with the reason when one is not allowed."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that training changes."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Strict inverse of `state_dict`, in place."""
        ...

    def frozen_state_dict(self) -> dict[str, Any]:
        """Weights that never change (reference, reward models)."""
        ...

    def load_frozen_state_dict(self, state: Mapping[str, Any]) -> None:
        """Strict inverse of `frozen_state_dict`, in place."""
        ...

    def describe(self) -> dict[str, Any]:
        """What was asked for, as JSON values; goes to config.json."""
        ...

    def dataflow_json(self) -> dict[str, Any]:
        """The graph, as JSON values; goes to dataflow.json."""
        ...

    def release(self, owner: str) -> None:
        """Drop device memory; `owner`, the folder of a run, owns the state from now on."""
        ...

    def reclaim(self, state: Mapping[str, Any], frozen: Mapping[str, Any]) -> None:
        """Take the state back from a run: room for it, the frozen weights, then everything else."""
        ...

    def close(self) -> None:
        """Free everything for good."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Where reduced metrics go, step after step."""

    def write(self, metrics: StepMetrics) -> None:
        """Store one step."""
        ...

    def close(self) -> None:
        """Flush and close; writing afterwards is an error."""
        ...


def rollout_count(rollouts: Mapping[str, Sequence[Any]]) -> int:
    """Rows (B) of a rollout table; 0 for an empty one."""
    return len(next(iter(rollouts.values()), ()))
