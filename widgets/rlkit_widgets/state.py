"""What the widgets know of a run, read from its folder: status, settings, requests and the points worth drawing."""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit.runs.control import send
from rlkit.runs.curves import matches
from rlkit.runs.layout import RunFolder
from rlkit.runs.protocol import LIVE_STATES
from rlkit.runs.reader import RunReader
from rlkit_widgets.series import Series

Json = dict[str, Any]
REMEMBERED_REQUESTS = 100
STEPS_FOR_PACE = 20


@dataclass
class Changes:
    """What one look at the folder found new."""

    status: bool = False
    settings: bool = False
    points: bool = False
    rollouts: bool = False
    requests: list[Json] = field(default_factory=list)


class RunState:
    """Follows one run folder. `look()` reads what is new; nothing here talks to a page or holds a trainer.

    Args:
        folder: the run folder.
        patterns: names of the metrics to keep, as in `MetricPlots`; None keeps all, an empty sequence none.
    """

    def __init__(self, folder: RunFolder, patterns: Sequence[str] | None = None) -> None:
        self.folder = folder
        self.reader = RunReader(folder.root)
        self.patterns = patterns
        self.status: Json = {}
        """status.json as it is now: with "alive", and "failed" when the driver died; without the settings."""
        self.heartbeat_age_s = 0.0
        self.settings: Json = {}
        self.series: dict[str, Series] = {}
        self.requests: OrderedDict[str, Json] = OrderedDict()
        self.rollout_steps: list[int] = []
        self.nonfinite: dict[str, tuple[int, str]] = {}
        self._setting_specs: Json = {}
        self._settings_time = 0.0  # status.json may be older than the latest "settings" event
        self._pace: deque[tuple[float, int]] = deque(maxlen=STEPS_FOR_PACE)

    @property
    def name(self) -> str:
        return str(self.status.get("run") or self.folder.name)

    @property
    def driven(self) -> bool:
        """Whether a driver is there to answer requests."""
        return bool(self.status.get("alive"))

    @property
    def final(self) -> bool:
        """Whether the run has ended, so that nothing more can be asked of it."""
        return self.status.get("state", "starting") not in LIVE_STATES

    @property
    def setting_specs(self) -> Json:
        """Per live setting its "type", "min", "max" and "doc", from config.json; empty when it has none."""
        if not self._setting_specs:
            self._setting_specs = dict(self.reader.config().get("setting_specs") or {})
        return self._setting_specs

    def look(self) -> Changes:
        """Read the status and the new events."""
        changes = Changes()
        for event in self.reader.poll():
            self._absorb(event, changes)
        status = self.reader.live_status()
        settings = status.pop("settings", None)
        if float(status.get("heartbeat") or 0.0) >= self._settings_time:
            self._adopt_settings(settings, changes)
        self.heartbeat_age_s = float(status.pop("heartbeat_age_s"))
        changes.status = status != self.status
        self.status = status
        return changes

    def request(self, kind: str, args: Json, nonce: str | None = None) -> Json:
        """Append a request to the run's control file and remember it as pending until the driver answers.

        `nonce` is the page's own name for it: the page learns the run's id by it.
        """
        identifier = send(self.folder.root, kind, args, "widget")
        note: Json = {
            "id": identifier,
            "nonce": nonce,
            "kind": kind,
            "args": args,
            "status": "pending",
            "step": None,
            "reason": None,
            "source": "widget",
        }
        self._remember(note)
        return note

    def step_seconds(self) -> float | None:
        """Mean wall-clock seconds of the latest steps, or None before the second one."""
        if len(self._pace) < 2 or self._pace[-1][1] <= self._pace[0][1]:
            return None
        (first_time, first_step), (last_time, last_step) = self._pace[0], self._pace[-1]
        return max(0.0, last_time - first_time) / (last_step - first_step)

    def _absorb(self, event: Mapping[str, Any], changes: Changes) -> None:
        match event.get("type"):
            case "metrics":
                self._add_points(event)
                changes.points = True
            case "request":
                note = {key: event.get(key) for key in ("id", "kind", "args", "status", "step", "reason", "source")}
                self._remember(note)
                changes.requests.append(note)
            case "settings":
                self._adopt_settings(event.get("settings"), changes)
                self._settings_time = float(event.get("time") or 0.0)
            case "rollouts":
                step = int(event["step"])
                while self.rollout_steps and self.rollout_steps[-1] >= step:
                    self.rollout_steps.pop()
                self.rollout_steps.append(step)
                changes.rollouts = True

    def _add_points(self, event: Mapping[str, Any]) -> None:
        step = int(event["step"])
        while self._pace and self._pace[-1][1] >= step:
            self._pace.pop()
        self._pace.append((float(event.get("time") or 0.0), step))
        nonfinite = event.get("nonfinite") or {}
        for name, value in event["metrics"].items():
            if self.patterns is not None and not matches(name, self.patterns):
                continue
            if name not in self.series:
                self.series[name] = Series()
            self.series[name].append(step, math.nan if value is None else float(value))
            if name in nonfinite:
                self.nonfinite[name] = (step, str(nonfinite[name]))

    def _adopt_settings(self, settings: Mapping[str, Any] | None, changes: Changes) -> None:
        if settings is not None and dict(settings) != self.settings:
            self.settings = dict(settings)
            changes.settings = True

    def _remember(self, note: Json) -> None:
        known = self.requests.pop(str(note["id"]), {})
        note.setdefault("nonce", known.get("nonce"))
        self.requests[str(note["id"])] = note
        while len(self.requests) > REMEMBERED_REQUESTS:
            self.requests.popitem(last=False)
