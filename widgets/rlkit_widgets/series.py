"""The points of one metric, kept small enough to draw: what a strip cannot show stays on disk."""

from array import array

import numpy as np
from numpy.typing import NDArray

from rlkit.runs.curves import decimate

PAGE_LIMIT = 2_000
"""Most points of one series that a page is sent at once."""
KEPT_LIMIT = 8_192
"""Most settled points of one series held in memory before they are thinned out."""

Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps, increasing, and values, NaN where the metric was not finite; (N,) float64 each."""


class Series:
    """Points of one metric: settled ones, which a page can ask for, and fresh ones, which no tick has carried yet."""

    def __init__(self) -> None:
        self._steps = array("d")
        self._values = array("d")
        self._fresh_steps = array("d")
        self._fresh_values = array("d")

    def __len__(self) -> int:
        return len(self._steps) + len(self._fresh_steps)

    def append(self, step: float, value: float) -> None:
        """Add a point. A step that was seen before (a run taken up from a checkpoint) replaces it and all after it."""
        _drop_from(self._fresh_steps, self._fresh_values, step)
        _drop_from(self._steps, self._values, step)
        self._fresh_steps.append(step)
        self._fresh_values.append(value)
        if len(self._fresh_steps) > KEPT_LIMIT:
            self._fresh_steps, self._fresh_values = _thinned(self._fresh_steps, self._fresh_values)

    def take_fresh(self, limit: int) -> Points:
        """Settle the fresh points and return them, at most `limit` of them."""
        fresh = decimate(*_copies(self._fresh_steps, self._fresh_values), limit)
        self._steps.extend(self._fresh_steps)
        self._values.extend(self._fresh_values)
        self._fresh_steps, self._fresh_values = array("d"), array("d")
        if len(self._steps) > KEPT_LIMIT:
            self._steps, self._values = _thinned(self._steps, self._values)
        return fresh

    def points(self, limit: int = PAGE_LIMIT) -> Points:
        """All points, settled and fresh, at most `limit`."""
        return decimate(*_copies(self._steps + self._fresh_steps, self._values + self._fresh_values), limit)


def _thinned(steps: "array[float]", values: "array[float]") -> tuple["array[float]", "array[float]"]:
    kept_steps, kept_values = decimate(*_copies(steps, values), KEPT_LIMIT // 2)
    return array("d", kept_steps.tobytes()), array("d", kept_values.tobytes())


def _copies(steps: "array[float]", values: "array[float]") -> Points:
    """As numpy arrays of their own: an array that numpy looks into could not grow."""
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def _drop_from(steps: "array[float]", values: "array[float]", step: float) -> None:
    """Remove the points at `step` and later."""
    while steps and steps[-1] >= step:
        steps.pop()
        values.pop()
