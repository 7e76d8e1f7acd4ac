"""Curves drawn with characters: one-line sparklines and braille line charts. Plain numbers in, plain text out."""

import math
from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"
# Bits of a braille character by (row, column) of its 4 x 2 dots.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def sparkline(values: Sequence[float], width: int) -> str:
    """The curve of `values` in at most `width` bars; a blank where a value is not finite."""
    bars = resample(values, min(width, len(values)))
    low, high = bounds(bars)
    return "".join(" " if not math.isfinite(v) else _BARS[_level(v, low, high, len(_BARS))] for v in bars)


def braille(values: Sequence[float], width: int, height: int) -> list[str]:
    """The curve of `values` as `height` lines of `width` characters, each character 2 x 4 dots.

    The curve takes the whole width, lowest value at the bottom and highest at the top. Neighbouring points are joined;
    values that are not finite leave a gap.
    """
    points = resample(values, 2 * width)
    low, high = bounds(points)
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for x, value in enumerate(points):
        if not math.isfinite(value):
            previous = None
            continue
        y = 4 * height - 1 - _level(value, low, high, 4 * height)
        start = y if previous is None else previous + (y > previous) - (y < previous)
        for row in range(min(start, y), max(start, y) + 1):
            cells[row // 4][x // 2] |= _DOTS[row % 4][x % 2]
        previous = y
    return ["".join(chr(0x2800 + bits) for bits in row) for row in cells]


def resample(values: Sequence[float], count: int) -> list[float]:
    """`count` values along the curve: means of equal stretches where there are more, straight lines where fewer.

    Values that are not finite are left out of the means. One value stays one value; none stay none.
    """
    n = len(values)
    if n <= 1 or count < 1:
        return list(values[:count])
    if n >= count:
        edges = [n * i // count for i in range(count + 1)]
        return [_mean(values[a:b]) for a, b in pairwise(edges)]
    out = []
    for i in range(count):
        place = i * (n - 1) / (count - 1)
        left = min(int(place), n - 2)
        share = place - left
        out.append(values[left] if share == 0 else values[left] * (1 - share) + values[left + 1] * share)
    return out


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest finite value; (0, 0) when there is none."""
    finite = [v for v in values if math.isfinite(v)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def number(value: float) -> str:
    """A number in few characters: 0.4213, 1.2e-06, 18.8k, nan."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size and size < 1e-3:
        return f"{value:.2g}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """45s, 3m 20s, 2h 05m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _level(value: float, low: float, high: float, levels: int) -> int:
    """Which of `levels` equal bands between low and high holds the value; the middle one when they are equal."""
    if high <= low:
        return (levels - 1) // 2
    return min(levels - 1, int((value - low) / (high - low) * levels))


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan
