"""Reductions: how the values of one metric become one number. Each pools raw parts, so that averages of averages
never happen, whatever the number of micro-batches or ranks.

A reduction is fed by `add_sum_count(total, count)`; what total and count mean is said per class. `merge` pools
another rank's part.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self, TypedDict

from rlkit.errors import ConfigError


class ReductionState(TypedDict):
    """A reduction as JSON values."""

    kind: str
    parts: list[float]


class Reduction(ABC):
    """Base of all reductions. `parts` are the raw numbers that are pooled."""

    kind: ClassVar[str]
    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[float] = self._empty()

    def _empty(self) -> list[float]:
        return [0.0, 0.0]

    def add(self, value: float, count: float = 1.0) -> None:
        """Take in one value that stands for `count` items."""
        self.add_sum_count(value * count, count)

    def add_sum_count(self, total: float, count: float) -> None:
        """Take in a total over `count` items."""
        raise ConfigError(f"the reduction {self.kind!r} takes single values, not (sum, count) pairs; use add.")

    def merge(self, other: Self) -> None:
        """Pool the part of another rank."""
        self.parts = [mine + theirs for mine, theirs in zip(self.parts, other.parts, strict=True)]

    @property
    def has_value(self) -> bool:
        """False when nothing was counted, so that there is nothing to report."""
        return True

    @abstractmethod
    def value(self, elapsed_s: float) -> float:
        """The reduced number; NaN when nothing was added. `elapsed_s`: seconds since the last flush."""

    def state(self) -> ReductionState:
        """Raw parts, for another rank's `merge`."""
        return {"kind": self.kind, "parts": list(self.parts)}


class Mean(Reduction):
    """sum(value * count) / sum(count)."""

    kind = "mean"
    __slots__ = ()

    def add_sum_count(self, total: float, count: float) -> None:
        self.parts[0] += total
        self.parts[1] += count

    @property
    def has_value(self) -> bool:
        return self.parts[1] != 0

    def value(self, elapsed_s: float) -> float:
        total, count = self.parts
        return total / count if count else math.nan


class Sum(Reduction):
    """Sum of everything added; ranks add up. `add(value, count)` adds value * count."""

    kind = "sum"
    __slots__ = ()

    def add_sum_count(self, total: float, count: float) -> None:
        self.parts[0] += total
        self.parts[1] += 1

    def value(self, elapsed_s: float) -> float:
        return self.parts[0] if self.parts[1] else math.nan


class Min(Reduction):
    """The lowest value; NaN as soon as one value is NaN."""

    kind = "min"
    __slots__ = ()

    def _empty(self) -> list[float]:
        return [math.inf]

    def add(self, value: float, count: float = 1.0) -> None:
        if math.isnan(value) or value < self.parts[0]:
            self.parts[0] = value

    def merge(self, other: Self) -> None:
        self.add(other.parts[0])

    def value(self, elapsed_s: float) -> float:
        return self.parts[0]


class Max(Reduction):
    """The highest value; NaN as soon as one value is NaN."""

    kind = "max"
    __slots__ = ()

    def _empty(self) -> list[float]:
        return [-math.inf]

    def add(self, value: float, count: float = 1.0) -> None:
        if math.isnan(value) or value > self.parts[0]:
            self.parts[0] = value

    def merge(self, other: Self) -> None:
        self.add(other.parts[0])

    def value(self, elapsed_s: float) -> float:
        return self.parts[0]


class Last(Reduction):
    """The value added last. Of several ranks, the one merged into keeps its own, when it has one."""

    kind = "last"
    __slots__ = ()

    def _empty(self) -> list[float]:
        return [math.nan, 0.0]

    def add(self, value: float, count: float = 1.0) -> None:
        self.parts = [value, 1.0]

    def merge(self, other: Self) -> None:
        if not self.parts[1]:
            self.parts = list(other.parts)

    def value(self, elapsed_s: float) -> float:
        return self.parts[0]


class Rate(Reduction):
    """Amount per second. `add(amount)` uses the time since the last flush; `add_sum_count(amount, seconds)` the time
    that the work itself took. Amounts of ranks add up; ranks work at the same time, so the longest time counts.
    """

    kind = "rate"
    __slots__ = ()

    def add(self, value: float, count: float = 1.0) -> None:
        self.parts[0] += value * count

    def add_sum_count(self, total: float, count: float) -> None:
        self.parts[0] += total
        self.parts[1] += count

    def merge(self, other: Self) -> None:
        self.parts = [self.parts[0] + other.parts[0], max(self.parts[1], other.parts[1])]

    def value(self, elapsed_s: float) -> float:
        seconds = self.parts[1] or elapsed_s
        return self.parts[0] / seconds if seconds > 0 else math.nan


REDUCTIONS: dict[str, type[Reduction]] = {cls.kind: cls for cls in (Mean, Sum, Min, Max, Last, Rate)}


def from_state(state: ReductionState) -> Reduction:
    """Inverse of `Reduction.state`. Raises ConfigError for an unknown kind or a wrong number of parts."""
    cls = REDUCTIONS.get(state["kind"])
    if cls is None:
        raise ConfigError(f"unknown reduction {state['kind']!r}; known: {', '.join(REDUCTIONS)}")
    reduction = cls()
    parts: list[Any] = state["parts"]
    if len(parts) != len(reduction.parts):
        raise ConfigError(f"the reduction {cls.kind!r} has {len(reduction.parts)} parts, got {len(parts)}")
    reduction.parts = [float(part) for part in parts]
    return reduction
