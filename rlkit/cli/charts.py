"""A metric as a small chart in a terminal."""

from bisect import bisect_left
from collections.abc import Sequence

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from rlkit.cli.plot import bounds, braille, number
from rlkit.cli.view import Series

_AXIS = 9
BORDER = "bright_black"


def heading(text: str, value: str = "") -> Text:
    """The title of a panel, with a value beside it."""
    return Text.assemble((text, "not dim bold default"), ("  " + value if value else "", "not dim cyan"))


def chart(name: str, series: Series, width: int, height: int, marks: Sequence[int] = ()) -> Panel:
    """A panel of `width` x `height` characters with the curve, its range, and a mark below each step in `marks`."""
    columns, rows = max(4, width - 4 - _AXIS), max(1, height - 3)
    low, high = bounds(series.values)
    lines = []
    for index, row in enumerate(braille(series.values, columns, rows)):
        label = number(high) if index == 0 else number(low) if index == rows - 1 else ""
        lines.append(Text.assemble((f"{label:>{_AXIS - 1}} ", "dim"), (row, "cyan"), no_wrap=True))
    lines.append(_steps_line(series, columns, marks))
    title = heading(name, number(series.last))
    return Panel(Group(*lines), title=title, title_align="left", border_style=BORDER, width=width, height=height)


def _steps_line(series: Series, columns: int, marks: Sequence[int]) -> Text:
    """First and last step under the curve, and an arrow where a setting was changed."""
    first, last = str(series.steps[0]), str(series.steps[-1])
    cells = list(first.ljust(columns))
    if columns > len(first) + len(last) + 1 and len(series.steps) > 1:
        cells[columns - len(last) :] = list(last)
    arrows = set()
    for step in marks:
        if len(series.steps) > 1 and series.steps[0] <= step <= series.steps[-1]:
            place = bisect_left(series.steps, step) / (len(series.steps) - 1)
            arrows.add(min(columns - 1, round(place * (columns - 1))))
    line = Text(" " * _AXIS, no_wrap=True)
    for index, cell in enumerate(cells):
        line.append("▲" if index in arrows else cell, style="bold yellow" if index in arrows else "dim")
    return line
