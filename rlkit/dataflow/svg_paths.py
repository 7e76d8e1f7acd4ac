"""SVG path data for the lines of a drawn graph."""

from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["Point", "around", "number", "through"]

Point: TypeAlias = tuple[float, float]

_TURN = 6.0


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def through(points: Sequence[Point]) -> str:
    """A path through points that leaves and reaches each of them horizontally."""
    (x, y), *rest = points
    path = f"M{number(x)} {number(y)}"
    for to_x, to_y in rest:
        half = (x + to_x) / 2
        straight = abs(to_y - y) < 0.5
        path += (
            f"H{number(to_x)}"
            if straight
            else f"C{number(half)} {number(y)} {number(half)} {number(to_y)} {number(to_x)} {number(to_y)}"
        )
        x, y = to_x, to_y
    return path


def around(start: Point, down_x: float, lane: float, up_x: float, end: Point, corner: float) -> str:
    """From `start` down at `down_x`, along the height `lane`, and up at `up_x` to `end`, with rounded corners.

    Where `start` or `end` lies beside its vertical, it is left or reached horizontally.
    """
    way = 1 if up_x > down_x else -1
    corner = min(corner, abs(up_x - down_x) / 2)
    path = f"M{number(start[0])} {number(start[1])}"
    if start[0] != down_x:
        path += _bend((down_x - _TURN, start[1]), (down_x, start[1]), (down_x, start[1] + _TURN))
    path += f"V{number(lane - corner)}" + _quad((down_x, lane), (down_x + way * corner, lane))
    path += f"H{number(up_x - way * corner)}" + _quad((up_x, lane), (up_x, lane - corner))
    path += f"V{number(end[1] + _TURN)}"
    if end[0] != up_x:
        path += _quad((up_x, end[1]), (up_x + _TURN, end[1])) + f"H{number(end[0] - _TURN)}"
    return path


def _bend(before: Point, at: Point, after: Point) -> str:
    return f"H{number(before[0])}" + _quad(at, after)


def _quad(at: Point, to: Point) -> str:
    return f"Q{number(at[0])} {number(at[1])} {number(to[0])} {number(to[1])}"
