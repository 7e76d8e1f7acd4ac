"""What a curriculum is made of: stages, their mixtures of pools, and the rules by which they end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlkit.config_fields import refuse_unknown
from rlkit.errors import ConfigError

BY_PASS_RATE: Final = "by_pass_rate"


@dataclass(frozen=True)
class Ramp:
    """A weight that moves on a straight line while its stage lasts, and then stays.

    Attributes:
        start: weight of the stage's first step, 0 or more.
        end: weight after `steps` steps of the stage, 0 or more.
        steps: length of the way from start to end, counted from entering the stage.

    Raises:
        ConfigError: a weight that is negative or no number, or less than one step.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            object.__setattr__(self, name, weight(getattr(self, name), f"{name} of a ramp"))
        _whole(self.steps, "steps of a ramp")

    def at(self, stage_steps: int) -> float:
        """The weight after `stage_steps` steps of the stage."""
        return self.start + (self.end - self.start) * min(stage_steps / self.steps, 1.0)


@dataclass(frozen=True)
class Steps:
    """A stage ends after this many steps.

    Raises:
        ConfigError: less than one step.
    """

    steps: int

    def __post_init__(self) -> None:
        _whole(self.steps, "steps of a stage")

    def __str__(self) -> str:
        return f"{self.steps} steps"


@dataclass(frozen=True)
class Reaches:
    """A stage ends when a metric holds at or above a value, and comes back when the metric later falls.

    The metric may be any that the trainer reports after a step, or one of the curriculum's own: the pass rate of one
    pool ("curriculum/easy_pass_rate") does not drop merely because the next stage mixes in harder prompts, as
    "reward/mean" does. A step without the metric, or where it is NaN, counts neither for nor against.

    Attributes:
        metric: name of the metric; None takes the curriculum's `measure`.
        value: the threshold.
        for_steps: steps in a row at or above `value` that end the stage, and below `falls_back_below` that bring it
            back.
        falls_back_below: lower threshold, watched during the next stage alone; None never goes back. The further it
            lies below `value`, the more noise is needed for the curriculum to go back and forth.
        smoothing: weight a of the past in a running average, average <- a * average + (1 - a) * metric, which starts
            at the first metric in a stage and is compared with the thresholds; 0 compares the metric itself.

    Raises:
        ConfigError: a threshold that is no finite number, falls_back_below above value, less than one step, or a
            smoothing outside [0, 1).
    """

    metric: str | None
    value: float
    for_steps: int = 1
    falls_back_below: float | None = None
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.metric is not None and (not isinstance(self.metric, str) or not self.metric):
            raise ConfigError(f"Reaches needs the name of a metric, such as 'reward/mean', given {self.metric!r}")
        object.__setattr__(self, "value", number(self.value, "value of Reaches"))
        _whole(self.for_steps, "for_steps of Reaches")
        object.__setattr__(self, "smoothing", number(self.smoothing, "smoothing of Reaches"))
        if not 0.0 <= self.smoothing < 1.0:
            raise ConfigError(f"smoothing of Reaches must be at least 0 and below 1, given {self.smoothing}")
        if self.falls_back_below is not None:
            object.__setattr__(self, "falls_back_below", number(self.falls_back_below, "falls_back_below"))
            if self.falls_back_below > self.value:
                raise ConfigError(
                    f"falls_back_below={self.falls_back_below} is above value={self.value}, so the stage would end and "
                    "come back at once; put it below the value"
                )

    def __str__(self) -> str:
        back = "" if self.falls_back_below is None else f", back below {self.falls_back_below:g}"
        smooth = f", smoothed {self.smoothing:g}" if self.smoothing else ""
        return f"{self.metric} ≥ {self.value:g} for {self.for_steps} steps{back}{smooth}"


Until = Steps | Reaches


@dataclass(frozen=True)
class Stage:
    """One stretch of training with a mixture of its own.

    Attributes:
        name: of the stage, unique in the curriculum.
        mixture: weight of each pool, a number or a `Ramp`; pools left out have weight 0, and only the proportions
            matter. "by_pass_rate" weighs every pool by p (1 - p) + floor, where p is its running pass rate (0.5 as long
            as nothing is known): prompts neither solved nor hopeless come most often.
        until: what ends the stage; None for the last one, which goes on.
        rewards: reward or rewards in force during the stage, kept for the trainer; None leaves the trainer's own.

    Raises:
        ConfigError: no name, or a mixture or rule of the wrong type.
    """

    name: str
    mixture: Mapping[str, float | Ramp] | str
    until: Until | None = None
    rewards: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigError(f"a stage needs a name, given {self.name!r}")
        where = f"stage {self.name!r}"
        if isinstance(self.mixture, str):
            if self.mixture != BY_PASS_RATE:
                raise ConfigError(f"{where}: mixture={self.mixture!r} is neither weights nor {BY_PASS_RATE!r}")
        elif isinstance(self.mixture, Mapping):
            ramps = {pool: w for pool, w in self.mixture.items() if isinstance(w, Ramp)}
            plain = {p: weight(w, f"{where}: weight of pool {p!r}") for p, w in self.mixture.items() if p not in ramps}
            object.__setattr__(self, "mixture", {pool: ramps.get(pool, plain.get(pool)) for pool in self.mixture})
        else:
            raise ConfigError(
                f"{where}: the mixture must be {{pool: weight}} or {BY_PASS_RATE!r}, given {self.mixture!r:.80}"
            )
        if self.until is not None and not isinstance(self.until, Steps | Reaches):
            raise ConfigError(f"{where}: until must be Steps(n), Reaches(metric, value) or None, given {self.until!r}")

    def describe(self) -> dict[str, Any]:
        """The declaration as JSON values, without the rewards."""
        mixture: Any = self.mixture
        if not isinstance(mixture, str):
            mixture = {pool: dataclasses.asdict(w) if isinstance(w, Ramp) else w for pool, w in mixture.items()}
        return {"name": self.name, "mixture": mixture, "until": rule_json(self.until)}

    def mixture_text(self) -> str:
        """The mixture in a line, for people."""
        if isinstance(self.mixture, str):
            return "by pass rate"
        return ", ".join(
            f"{pool} {f'{w.start:g} → {w.end:g} in {w.steps} steps' if isinstance(w, Ramp) else f'{w:g}'}"
            for pool, w in self.mixture.items()
        )


def rule_json(until: Until | None) -> dict[str, Any] | None:
    """A rule as JSON values; None where there is none."""
    return None if until is None else dataclasses.asdict(until)


def edited_rule(stage: str, until: Until | None, changes: Any) -> Until:
    """The rule of a stage with some of its values changed.

    Raises:
        ConfigError: the stage has no rule, a key is unknown (the nearest is named), or a value is out of range.
    """
    if until is None:
        raise ConfigError(f"stage {stage!r} is the last one and has no rule to change")
    if not isinstance(changes, Mapping):
        raise ConfigError(f"the rule of stage {stage!r} is changed by a dictionary of its values, given {changes!r}")
    if isinstance(until, Reaches) and changes.get("metric", until.metric) != until.metric:
        raise ConfigError(f"stage {stage!r} watches {until.metric!r}; the metric itself is fixed")
    refuse_unknown(changes, (entry.name for entry in dataclasses.fields(until)), what=f"stage {stage!r} until")
    return dataclasses.replace(until, **changes)


def weight(value: Any, what: str) -> float:
    """A weight of 0 or more as a float. Raises ConfigError for anything else."""
    checked = number(value, what)
    if checked < 0:
        raise ConfigError(f"{what} must be 0 or more, given {value!r}")
    return checked


def number(value: Any, what: str) -> float:
    """A finite number as a float. Raises ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{what} must be a finite number, given {value!r}")
    return float(value)


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{what} must be a whole number of at least 1, given {value!r}")
    return value
