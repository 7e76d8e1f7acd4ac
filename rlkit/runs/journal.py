"""Everything a step leaves in the run folder, in order, each once, also across a disk that fills up."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from rlkit.runs import events
from rlkit.runs.events import Event
from rlkit.runs.layout import RunFolder
from rlkit.runs.log import LineCursor, LineWriter, parse_line
from rlkit.runs.protocol import Sink, StepMetrics, StepResult, rollout_count
from rlkit.runs.rollouts import write_rollouts
from rlkit.runs.sinks import EventSink

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskFullError(OSError):
    """There is no room for what the run has to write. What could not be written is kept and tried again."""


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that the disk (or a quota on it) is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def describe_full(error: BaseException) -> str:
    """ "disk full" and the file that had no room, when it is known."""
    place = getattr(error, "filename", None)
    return f"disk full ({place})" if place else "disk full"


class Journal:
    """The writer of events.jsonl, rollouts and sinks. What cannot be written waits in memory, in order."""

    def __init__(self, folder: RunFolder, sinks: Sequence[Sink] = ()) -> None:
        self._folder = folder
        self._writer = LineWriter(folder.events)
        self._sinks: tuple[Sink, ...] = (EventSink(self._writer), *sinks)
        self._waiting: deque[Callable[[], None]] = deque()

    def history(self) -> tuple[set[str], set[str]]:
        """Ids of the requests that have an answer on disk, and paths of the checkpoints that were announced."""
        answered, announced = set(), set()
        for _, line in LineCursor(self._folder.events).lines():
            kind = events.type_of(line)
            if kind in ("request", "checkpoint") and (event := parse_line(line)) is not None:
                if kind == "request":
                    answered.add(str(event.get("id")))
                else:
                    announced.add(str(event.get("path")))
        return answered, announced

    def put(self, *items: Event) -> None:
        """Take in events; `flush` writes them."""
        self._waiting.append(partial(self._writer.write, *items))

    def put_step(self, result: StepResult) -> None:
        """Take in what a step produced."""
        if rollout_count(result.rollouts):
            self._waiting.append(partial(self._write_rollouts, result))
        metrics = StepMetrics(result.step, result.metrics, result.spans)
        self._waiting.extend(partial(sink.write, metrics) for sink in self._sinks)

    def _write_rollouts(self, result: StepResult) -> None:
        path = write_rollouts(self._folder, result.step, result.rollouts)
        rows = rollout_count(result.rollouts)
        self._writer.write(events.rollouts(result.step, self._folder.relative(path), rows))

    def flush(self) -> None:
        """Write everything that waits. Raises DiskFullError; the rest still waits then."""
        while self._waiting:
            try:
                self._waiting[0]()
            except OSError as error:
                if is_disk_full(error):
                    raise DiskFullError(error.errno, error.strerror, error.filename) from error
                raise
            self._waiting.popleft()

    @property
    def clear(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def close(self) -> None:
        """Sync the log and close all files."""
        self._writer.sync()
        for sink in self._sinks:
            sink.close()
