"""The messages between the kernel and the page: short JSON, with points in binary buffers beside it.

To the page, every message has a "kind":

- "hello": who the run is, its status, settings and latest requests; starts a page anew.
- "history": points of some series, all that a page can show; several messages share a long list of metrics.
- "tick": what is new since the last one; empty ones say that the kernel is alive.
- "rollouts": one step's rollouts, texts shortened; "rollout": one of them in full.

Points travel as `"series": [[id, count], ...]` with two buffers: all steps, float64, and all values, float32, one
series after the other. `"names": [[id, name], ...]` introduces an id before its first use.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rlkit_widgets.series import PAGE_LIMIT, Points
from rlkit_widgets.state import Changes, Json, RunState

Message = tuple[Json, list[bytes]]
NamedPoints = tuple[int, Points]

TICK_LIMIT = 200
"""Most points of one series in a tick; more in a quarter of a second cannot be seen."""
HISTORY_POINTS = 20_000
"""Points after which a history message is closed and another begun: about 240 kB."""
REQUESTS_SHOWN = 20


class Encoder:
    """Gives each metric its short id and builds the messages of one widget."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._ids: dict[str, int] = {}

    def hello(self) -> Message:
        """First message to a page. Forgets which names were introduced: a new page knows none."""
        self._ids.clear()
        state = self._state
        content: Json = {
            "kind": "hello",
            "run": state.name,
            "folder": str(state.folder),
            "status": self._status(),
            "settings": state.settings,
            "specs": state.setting_specs,
            "requests": list(state.requests.values())[-REQUESTS_SHOWN:],
            "nonfinite": state.nonfinite,
        }
        return content, []

    def history(self) -> Iterator[Message]:
        """Every series from the start, thinned to what a page can show, in messages of bounded size."""
        self._take_fresh()
        batch: list[NamedPoints] = []
        names: list[tuple[int, str]] = []
        points = 0
        for name, series in self._state.series.items():
            identifier, new = self._id(name)
            names += [(identifier, name)] if new else []
            batch.append((identifier, series.points(PAGE_LIMIT)))
            points += len(batch[-1][1][0])
            if points >= HISTORY_POINTS:
                yield _with_points({"kind": "history", "names": names}, batch)
                batch, names, points = [], [], 0
        if batch:
            yield _with_points({"kind": "history", "names": names}, batch)

    def tick(self, changes: Changes, answered: Sequence[Json] = ()) -> Message:
        """What `changes` found new, and requests that were just written down for the page."""
        content: Json = {"kind": "tick", "status": self._status()}
        if changes.settings:
            content["settings"] = self._state.settings
            content["specs"] = self._state.setting_specs
        requests = [*answered, *changes.requests[-REQUESTS_SHOWN:]]
        if requests:
            content["requests"] = requests
        if not changes.points:
            return content, []
        content["nonfinite"] = self._state.nonfinite
        names = []
        batch = []
        for name, points in self._take_fresh():
            identifier, new = self._id(name)
            names += [(identifier, name)] if new else []
            batch.append((identifier, points))
        content["names"] = names
        return _with_points(content, batch)

    def _status(self) -> Json:
        state = self._state
        status = {key: state.status.get(key) for key in ("state", "step", "total_steps", "reason", "alive", "parked")}
        pace = state.step_seconds()
        status["age"] = round(state.heartbeat_age_s, 1)
        status["step_seconds"] = None if pace is None else round(pace, 3)
        return status

    def _take_fresh(self) -> list[tuple[str, Points]]:
        taken = [(name, series.take_fresh(TICK_LIMIT)) for name, series in self._state.series.items()]
        return [(name, points) for name, points in taken if len(points[0])]

    def _id(self, name: str) -> tuple[int, bool]:
        """Id of a metric and whether the page hears of it for the first time."""
        if name in self._ids:
            return self._ids[name], False
        self._ids[name] = len(self._ids)
        return self._ids[name], True


def _with_points(content: Json, batch: Iterable[NamedPoints]) -> Message:
    batch = list(batch)
    content["series"] = [[identifier, len(points[0])] for identifier, points in batch]
    if not batch:
        return content, []
    steps = np.concatenate([points[0] for _, points in batch])
    values = np.concatenate([points[1] for _, points in batch])
    with np.errstate(over="ignore"):  # a value beyond float32 draws as infinite
        return content, [steps.astype("<f8").tobytes(), values.astype("<f4").tobytes()]
