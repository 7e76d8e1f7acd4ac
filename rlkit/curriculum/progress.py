"""Where a curriculum stands: the stage in force, what has been watched in it, and when it moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rlkit.curriculum.stages import Reaches, Steps, Until
from rlkit.errors import CheckpointError


@dataclass(frozen=True)
class Watch:
    """How a metric has stood to a threshold in the last steps of the stage."""

    average: float | None = None
    """Smoothed metric; None before the first one."""
    streak: int = 0
    """Steps in a row on the far side of the threshold."""

    def seen(self, value: float | None, smoothing: float, *, at_least: float | None, below: float | None) -> Watch:
        """After one more step; unchanged where the metric is missing (None) or NaN."""
        if value is None or math.isnan(value):
            return self
        average = value if self.average is None else smoothing * self.average + (1.0 - smoothing) * value
        crossed = (at_least is not None and average >= at_least) or (below is not None and average < below)
        return Watch(average, self.streak + 1 if crossed else 0)


@dataclass(frozen=True)
class Move:
    """A change of stage: the index of the new one, and why."""

    to: int
    reason: str


@dataclass(frozen=True)
class Progress:
    """Position in the list of stages. Immutable: each step and each change gives a new one."""

    stage: int = 0
    """Index of the stage in force."""
    stage_steps: int = 0
    """Steps taken in it since it was last entered."""
    step: int = 0
    """The trainer's step that was observed last."""
    by_hand: bool = False
    """Entered by a jump, so that what ended the stage before is not known to hold and brings nothing back."""
    reached: Watch = field(default_factory=Watch)
    """The metric that ends this stage."""
    fallen: Watch = field(default_factory=Watch)
    """The metric that ended the stage before, against its lower threshold."""

    def enter(self, stage: int, *, by_hand: bool) -> Progress:
        """The start of a stage; nothing watched before counts."""
        return Progress(stage=stage, step=self.step, by_hand=by_hand)

    def observe(self, step: int, metrics: Mapping[str, float], rules: Sequence[Until | None]) -> Progress:
        """After one more step in the stage.

        Args:
            step: of the trainer.
            metrics: of the step.
            rules: of each stage; a metric of None must have been filled in.
        """
        rule, back = rules[self.stage], self._way_back(rules)
        reached, fallen = self.reached, self.fallen
        if isinstance(rule, Reaches) and rule.metric is not None:
            reached = reached.seen(metrics.get(rule.metric), rule.smoothing, at_least=rule.value, below=None)
        if back is not None and back.metric is not None:
            value = metrics.get(back.metric)
            fallen = fallen.seen(value, back.smoothing, at_least=None, below=back.falls_back_below)
        return replace(self, step=step, stage_steps=self.stage_steps + 1, reached=reached, fallen=fallen)

    def due(self, rules: Sequence[Until | None]) -> Move | None:
        """The move to make now; None to stay. Going back comes before going on."""
        back = self._way_back(rules)
        if back is not None and self.fallen.streak >= back.for_steps:
            return Move(self.stage - 1, f"{back.metric} below {back.falls_back_below:g} for {self.fallen.streak} steps")
        rule = rules[self.stage]
        if isinstance(rule, Steps) and self.stage_steps >= rule.steps:
            return Move(self.stage + 1, f"after {self.stage_steps} steps")
        if isinstance(rule, Reaches) and self.reached.streak >= rule.for_steps:
            return Move(self.stage + 1, f"{rule.metric} at or above {rule.value:g} for {self.reached.streak} steps")
        return None

    def _way_back(self, rules: Sequence[Until | None]) -> Reaches | None:
        """The rule that can bring the stage before back."""
        rule = rules[self.stage - 1] if self.stage > 0 and not self.by_hand else None
        return rule if isinstance(rule, Reaches) and rule.falls_back_below is not None else None

    def state_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], stages: int) -> Progress:
        """Takes back what `state_dict` gave. Raises CheckpointError for other keys or a stage that does not exist."""
        _require(state, cls, "progress of a curriculum")
        for name in ("reached", "fallen"):
            _require(state[name], Watch, f"{name} of a curriculum")
        if not 0 <= state["stage"] < stages:
            raise CheckpointError(f"the saved stage has index {state['stage']}, and there are {stages} stages")
        watches = {name: Watch(**state[name]) for name in ("reached", "fallen")}
        return cls(**{**state, **watches})


def _require(state: Mapping[str, Any], cls: type, what: str) -> None:
    if odd := sorted(set(state) ^ {entry.name for entry in fields(cls)}):
        raise CheckpointError(f"the saved {what} must have the keys of state_dict(); it differs in {odd}")
