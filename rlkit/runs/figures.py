"""Metrics of a run as a plotly figure, to explore and to export. plotly is imported on first use.

A figure has one subplot per pattern asked for; without patterns the rewards share one and every other metric has its
own. Metrics of one pattern that have different units (a suffix such as "_ms") never share an axis. Requests that the
run applied stand as upright marks.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlkit.errors import RunError
from rlkit.runs.curves import decimate, matches
from rlkit.runs.events import type_of
from rlkit.runs.log import LineCursor, parse_line
from rlkit.runs.protocol import LIVE_STATES
from rlkit.runs.reader import RunReader

if TYPE_CHECKING:
    import pandas as pd

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours: readers with any colour vision can tell them apart."""
TOTAL = "reward/mean"
TOTAL_COLOUR = TEXT_COLOUR = "#808080"
GRID_COLOUR = "rgba(128, 128, 128, 0.25)"
UNIT_SUFFIXES = ("_ms", "_mb", "_tokens_per_sec", "_per_sec", "_fraction")
POINTS_STATIC = 20_000
POINTS_LIVE = 2_000
LIVE_PERIOD_S = 0.5
ACKNOWLEDGED_WITHIN_S = 5.0
"""How long a live figure waits for the page to have drawn the last update before it sends the next all the same."""


def figure(reader: RunReader, *patterns: str, live: bool = False) -> Any:
    """Plot metrics over steps.

    Args:
        reader: the run.
        *patterns: which metrics, one subplot each, see `matches`. None: all metrics.
        live: follow the run. The figure sends an update only once the page has drawn the last one, thinned to what can
            be seen, and stops by itself when the run ends or the figure is closed.

    Returns:
        `plotly.graph_objects.Figure`, or a `FigureWidget` when live. Curves of more than 20,000 points are thinned
        so that every peak stays.

    Raises:
        RunError: no metric matches a pattern; names those that there are.
        ImportError: plotly is not installed (`pip install 'rlkit-lab[notebook]'`).
    """
    plotting = _Plotting(reader, patterns, POINTS_LIVE if live else POINTS_STATIC)
    drawn = plotting.draw()
    if not live:
        return drawn
    import plotly.graph_objects as go

    widget = go.FigureWidget(drawn)
    _Follower(widget, plotting).start()
    return widget


@dataclass
class _Cell:
    """One subplot."""

    title: str
    names: list[str]


class _Plotting:
    """What is plotted where, and the requests that were applied so far."""

    def __init__(self, reader: RunReader, patterns: Sequence[str], limit: int) -> None:
        self.reader = reader
        self.patterns = patterns
        self.limit = limit
        self.cells: list[_Cell] = []
        self.marks: list[dict[str, Any]] = []
        self._cursor = LineCursor(reader.folder.events)

    def draw(self) -> Any:
        from plotly.subplots import make_subplots

        frame = self.reader.metrics()
        self.cells = _cells(list(frame.columns), self.patterns)
        self.read_marks()
        columns = min(2, len(self.cells)) if not self.patterns else 1
        rows = -(-len(self.cells) // columns)
        titles = [cell.title for cell in self.cells]
        spacing = min(0.3 / rows, 0.12)
        fig = make_subplots(rows=rows, cols=columns, subplot_titles=titles, vertical_spacing=spacing)
        for place, cell in enumerate(self.cells):
            for name in cell.names:
                self.add_trace(fig, frame, place, name)
        self.add_marks(fig, self.marks)
        self._dress(fig, rows)
        return fig

    def _dress(self, fig: Any, rows: int) -> None:
        """Titles at the left, a legend per subplot at the right, colours that read on light and dark paper."""
        for place, cell in enumerate(self.cells):
            axis = "" if place == 0 else str(place + 1)
            right, top = fig.layout[f"xaxis{axis}"].domain[1], fig.layout[f"yaxis{axis}"].domain[1]
            left = fig.layout[f"xaxis{axis}"].domain[0]
            fig.layout.annotations[place].update(x=left, xanchor="left", font={"size": 13})
            if len(cell.names) > 1:
                position = {"x": right, "xanchor": "right", "y": top, "yanchor": "bottom", "orientation": "h"}
                fig.layout[f"legend{axis}"] = {**position, "font": {"size": 11}, "bgcolor": "rgba(0,0,0,0)"}
        lines = {"gridcolor": GRID_COLOUR, "zerolinecolor": GRID_COLOUR, "linecolor": GRID_COLOUR}
        fig.update_xaxes(matches="x", title_standoff=4, **lines)
        fig.update_yaxes(**lines)
        fig.update_xaxes(title_text="step", row=rows)
        fig.update_layout(
            template="none",
            height=80 + 220 * rows,
            margin={"l": 60, "r": 20, "t": 60, "b": 45},
            modebar={"bgcolor": "rgba(0,0,0,0)", "color": TEXT_COLOUR},
            hovermode="x unified" if len(self.cells) == 1 else "x",
            font={"color": TEXT_COLOUR},
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
        )

    def add_trace(self, fig: Any, frame: pd.DataFrame, place: int, name: str) -> None:
        import plotly.graph_objects as go

        cell = self.cells[place]
        steps, values = self.curve(frame, name)
        alone = len(cell.names) == 1
        colour = TOTAL_COLOUR if name == TOTAL and not alone else _colour(cell, name)
        line = {"color": colour, "width": 3 if name == TOTAL else 1.7}
        mode = "lines+markers" if len(steps) == 1 else "lines"
        trace = go.Scatter(x=steps, y=values, name=name, mode=mode, line=line, meta=name)
        trace.update(showlegend=not alone, legend="legend" if place == 0 else f"legend{place + 1}")
        columns = 1 if self.patterns else min(2, len(self.cells))
        fig.add_trace(trace, row=place // columns + 1, col=place % columns + 1)

    def curve(self, frame: pd.DataFrame, name: str) -> tuple[Any, Any]:
        """Steps, (N,) int32, and values, (N,) float64: types that travel as binary.

        Steps without a value are left out at both ends only, so that a gap stays a gap.
        """
        import numpy as np

        column = frame[name]
        column = column.loc[column.first_valid_index() : column.last_valid_index()]
        steps, values = decimate(column.index.to_numpy(np.float64), column.to_numpy(np.float64), self.limit)
        return steps.astype(np.int32), values

    def read_marks(self) -> list[dict[str, Any]]:
        """Requests that were applied since the last call."""
        fresh = []
        for _, line in self._cursor.lines():
            if type_of(line) != "request" or (event := parse_line(line)) is None:
                continue
            if event.get("status") == "applied" and event.get("kind") == "set":
                fresh.append(event)
        self.marks += fresh
        return fresh

    def add_marks(self, fig: Any, marks: Sequence[dict[str, Any]]) -> None:
        """An upright dotted line in every subplot; its text stands in the first."""
        shapes = []
        for event in marks:
            for place in range(len(self.cells)):
                axis = "" if place == 0 else str(place + 1)
                shape: dict[str, Any] = {
                    "type": "line",
                    "x0": event["step"],
                    "x1": event["step"],
                    "y0": 0,
                    "y1": 1,
                    "xref": f"x{axis}",
                    "yref": f"y{axis} domain",
                    "line": {"dash": "dot", "width": 1.2, "color": TOTAL_COLOUR},
                    "name": _label(event),
                }
                if place == 0:
                    font = {"size": 10}
                    shape["label"] = {"text": _label(event), "textangle": -90, "textposition": "end", "font": font}
                shapes.append(shape)
        if shapes:
            fig.update_layout(shapes=[*fig.layout.shapes, *shapes])


class _Follower:
    """The thread behind a live figure. Holds the figure weakly: dropping it ends the thread."""

    def __init__(self, widget: Any, plotting: _Plotting) -> None:
        self._widget = weakref.ref(widget)
        self._plotting = plotting
        self._rows = -1
        name = f"rlkit figure {plotting.reader.folder.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        sent_at = -math.inf
        while True:
            time.sleep(LIVE_PERIOD_S)
            widget = self._widget()
            if widget is None or widget.comm is None:
                return
            if _page_is_behind(widget) and time.monotonic() - sent_at < ACKNOWLEDGED_WITHIN_S:
                continue
            try:
                state = self._plotting.reader.live_status().get("state")
                if self.update(widget):
                    sent_at = time.monotonic()
            except RunError:  # the folder was removed; there is nothing more to follow
                return
            if state not in LIVE_STATES:
                return
            del widget

    def update(self, widget: Any) -> bool:
        """Send what is new as one update; whether there was anything."""
        frame = self._plotting.reader.metrics()
        marks = self._plotting.read_marks()
        if len(frame) == self._rows and not marks:
            return False
        self._rows = len(frame)
        self._add_new(widget, frame)
        with widget.batch_update():
            for trace in widget.data:
                trace.x, trace.y = self._plotting.curve(frame, trace.meta)
                trace.mode = "lines+markers" if len(trace.x) == 1 else "lines"
            self._plotting.add_marks(widget, marks)
        return True

    def _add_new(self, widget: Any, frame: pd.DataFrame) -> None:
        """Metrics that appeared since: into the subplot of the pattern that means them."""
        known = {trace.meta for trace in widget.data}
        for name in frame.columns:
            if name in known:
                continue
            for place, cell in enumerate(self._plotting.cells):
                pattern, unit = cell.title.split(" · ")[0], _unit(name)
                if matches(name, [pattern]) and unit == _unit(cell.names[0]):
                    cell.names.append(name)
                    self._plotting.add_trace(widget, frame, place, name)
                    break


def _page_is_behind(widget: Any) -> bool:
    """Whether an update was sent that the page has not drawn yet.

    Only the answer about traces counts: plotly 7.1's page sends the one about the layout under a name that its Python
    side does not listen to, so that `on_edits_completed` never calls back.
    """
    return bool(widget._trace_edit_in_process)


def _cells(names: Sequence[str], patterns: Sequence[str]) -> list[_Cell]:
    """The subplots: by pattern and unit, or, without patterns, the rewards together and every other metric alone."""
    cells: dict[str, _Cell] = {}
    if not names:
        raise RunError("the run has no metrics yet; its first point appears after the first step")
    if not patterns:
        for name in names:
            title = "reward" if name.startswith("reward/") and not _unit(name) else name
            cells.setdefault(title, _Cell(title, [])).names.append(name)
    for pattern in patterns:
        meant = [name for name in names if matches(name, [pattern])]
        if not meant:
            raise RunError(f"no metric matches {pattern!r}; the run has {', '.join(sorted(names))}")
        for name in meant:
            title = f"{pattern} · {_unit(name)}" if _unit(name) else pattern
            cells.setdefault(title, _Cell(title, [])).names.append(name)
    for cell in cells.values():
        cell.names.sort(key=lambda name: name == TOTAL)  # the total last, so that it is drawn on top
    return list(cells.values())


def _unit(name: str) -> str:
    """Unit that a metric's name ends with, "" for none."""
    return next((suffix.lstrip("_").replace("_", " ") for suffix in UNIT_SUFFIXES if name.endswith(suffix)), "")


def _colour(cell: _Cell, name: str) -> str:
    return PALETTE[cell.names.index(name) % len(PALETTE)]


def _label(event: dict[str, Any]) -> str:
    """What a request changed, e.g. "brevity = 0.3"."""
    parts = []
    for name, value in event["args"].items():
        terms = value.items() if isinstance(value, dict) else [(name, value)]
        parts += [f"{term} = {item:g}" if isinstance(item, int | float) else f"{term} = {item}" for term, item in terms]
    return ", ".join(parts)
