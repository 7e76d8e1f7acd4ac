"""Reading a run folder from any process: incremental, without torch, without disturbing the driver."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from rlkit.runs.events import type_of
from rlkit.runs.layout import RunFolder, read_json, read_status
from rlkit.runs.log import LineCursor, parse_line

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

Numbers: TypeAlias = "Sequence[float] | npt.NDArray[np.generic]"

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RunReader:
    """A view of one run folder. Each call reads only what was added since the last one."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Raises RunError when the folder is not a run."""
        self.folder = RunFolder.open(directory)
        self.bad_lines = 0
        """Complete lines that were no JSON object and were skipped by `poll`."""
        self._poll_cursor = LineCursor(self.folder.events)
        self._metrics = _MetricColumns(LineCursor(self.folder.events))
        self._answers = _Answers(LineCursor(self.folder.events))

    def status(self) -> dict[str, Any]:
        """status.json as the driver last wrote it. Raises RunError when it is unreadable."""
        return read_status(self.folder)

    def live_status(self) -> dict[str, Any]:
        """The status as it is now: with "alive" and "heartbeat_age_s", and "failed" when the driver died."""
        from rlkit.runs.liveness import live_status

        return live_status(self.folder, self.status())

    def config(self) -> dict[str, Any]:
        """config.json; {} when it cannot be read."""
        return read_json(self.folder.config)

    def dataflow(self) -> dict[str, Any]:
        """dataflow.json; {} when it cannot be read."""
        return read_json(self.folder.dataflow)

    def poll(self) -> list[dict[str, Any]]:
        """Events that were completed since the last poll, oldest first. A torn last line is left for later."""
        events = []
        for _, line in self._poll_cursor.lines():
            event = parse_line(line)
            if event is None:
                self.bad_lines += 1
            else:
                events.append(event)
        return events

    def answer(self, id_: str) -> dict[str, Any] | None:
        """The event that answers a request, or None while it is pending."""
        return self._answers.get(id_)

    def metrics(self) -> pd.DataFrame:
        """One row per step (index "step", int64), one float64 column per metric; NaN where a step has no value."""
        return self._metrics.frame()

    def rollouts(self, step: int | None = None, last: int | None = None) -> pd.DataFrame:
        """The recorded rollouts: of one step, of the `last` n recorded steps, or of all. Empty when there are none."""
        from rlkit.runs.rollouts import read_rollouts

        return read_rollouts(self.folder, step, last)


class _MetricColumns:
    """Metrics kept as columns of float64, so that 100,000 steps stay small and a frame is quick to build."""

    def __init__(self, cursor: LineCursor) -> None:
        self._cursor = cursor
        self._restarts = 0
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def _add(self, event: dict[str, Any]) -> None:
        step, values, nonfinite = event.get("step"), event.get("metrics"), event.get("nonfinite", {})
        if not isinstance(step, int) or not isinstance(values, dict):
            return
        rows = len(self._steps)
        self._steps.append(step)
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d")
            column.extend([math.nan] * (rows - len(column)))
            column.append(_NONFINITE.get(nonfinite.get(name, ""), math.nan) if value is None else float(value))

    def _update(self) -> None:
        for _, line in self._cursor.lines():
            if self._cursor.restarts != self._restarts:
                self._restarts = self._cursor.restarts
                self._steps, self._columns = array("q"), {}
            if type_of(line) == "metrics" and (event := parse_line(line)) is not None:
                self._add(event)

    def frame(self) -> pd.DataFrame:
        import numpy as np
        import pandas as pd

        self._update()
        rows = len(self._steps)
        data = {}
        for name, column in self._columns.items():
            column.extend([math.nan] * (rows - len(column)))
            data[name] = np.array(column, dtype=np.float64)
        index = pd.Index(np.array(self._steps, dtype=np.int64), name="step")
        frame = pd.DataFrame(data, index=index)
        return frame if index.is_unique else frame[~index.duplicated(keep="last")].sort_index()


class _Answers:
    """Answers to requests by id."""

    def __init__(self, cursor: LineCursor) -> None:
        self._cursor = cursor
        self._by_id: dict[str, dict[str, Any]] = {}

    def get(self, id_: str) -> dict[str, Any] | None:
        for _, line in self._cursor.lines():
            if type_of(line) == "request" and (event := parse_line(line)) is not None:
                self._by_id[str(event.get("id"))] = event
        return self._by_id.get(id_)


def decimate(xs: Numbers, ys: Numbers, max_points: int) -> tuple[list[float], list[float]]:
    """Thin a curve for drawing: the lowest and the highest point of each bucket stay, so no spike is lost.

    Args:
        xs: ascending positions (n).
        ys: values (n); NaN points are kept only where a bucket has nothing else.
        max_points: upper bound on the points returned, at least 4. The first and the last point always stay.

    Returns:
        Positions and values, in order, at most `max_points` of each.

    Raises:
        ValueError: lengths differ or `max_points` < 4.
    """
    import numpy as np

    n = len(xs)
    if n != len(ys):
        raise ValueError(f"xs and ys must be of one length, got {n} and {len(ys)}")
    if max_points < 4:
        raise ValueError(f"max_points must be at least 4, got {max_points}")
    positions, values = np.asarray(xs), np.asarray(ys, dtype=np.float64)
    if n <= max_points:
        return positions.tolist(), values.tolist()
    edges = np.linspace(1, n - 1, (max_points - 2) // 2 + 1).astype(int).tolist()
    kept = [0]
    for start, stop in pairwise(edges):
        bucket = values[start:stop]
        if np.isnan(bucket).all():
            kept.append(start)
        else:
            kept += sorted({start + int(np.nanargmin(bucket)), start + int(np.nanargmax(bucket))})
    kept.append(n - 1)
    return positions[kept].tolist(), values[kept].tolist()
