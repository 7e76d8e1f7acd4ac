"""Which curves are meant, and how a long one is thinned for drawing. Shared by figures and widgets."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a metric is meant: its whole name, a shell pattern ("reward/*"), or one of its parts ("kl")."""
    return any(fnmatchcase(name, pattern) or pattern in name.split("/") for pattern in patterns)


def decimate(steps: Floats, values: Floats, limit: int) -> tuple[Floats, Floats]:
    """Thin a curve for drawing so that no peak and no dip is lost.

    The curve is cut into equal buckets; each keeps its lowest and its highest point, in their order, or its first point
    when it holds nothing finite, so that a gap stays a gap. The first and the last point always stay.

    Args:
        steps: (N,) float64, increasing.
        values: (N,) float64, NaN where there is no value.
        limit: most points returned, at least 4.

    Returns:
        The chosen steps and values, (M,) float64 each with M at most `limit`.

    Raises:
        ValueError: `limit` is below 4.
    """
    import numpy as np

    if limit < 4:
        raise ValueError(f"limit must be at least 4, got {limit}")
    count = len(steps)
    if count <= limit:
        return steps, values
    size = -(-count // ((limit - 2) // 2))
    buckets = -(-count // size)
    padded = np.full(buckets * size, np.nan)
    padded[:count] = values
    grid = padded.reshape(buckets, size)
    starts = np.arange(buckets) * size
    lowest = starts + np.where(np.isnan(grid), np.inf, grid).argmin(axis=1)
    highest = starts + np.where(np.isnan(grid), -np.inf, grid).argmax(axis=1)
    chosen = np.unique(np.concatenate((lowest, highest, [0, count - 1])))
    return steps[chosen], values[chosen]
