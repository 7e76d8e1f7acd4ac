"""Where the metrics of a step go: the run folder always, TensorBoard and CSV when asked.

A failed write (a full disk) leaves each file as it was, so that the same step can be written again.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlkit.errors import ConfigError
from rlkit.runs import events
from rlkit.runs.layout import RunFolder, write_atomic
from rlkit.runs.log import LineWriter, write_all
from rlkit.runs.protocol import Sink, StepMetrics


class EventSink:
    """Metrics and spans as lines of events.jsonl."""

    def __init__(self, target: RunFolder | LineWriter) -> None:
        """`target`: a run folder, or the writer of its events.jsonl (there is only one writer)."""
        self._writer = target if isinstance(target, LineWriter) else LineWriter(target.events)

    def write(self, metrics: StepMetrics) -> None:
        """Append the lines of one step. Raises OSError."""
        lines = [events.metrics(metrics)]
        if metrics.spans:
            lines.append(events.spans(metrics.step, metrics.spans))
        self._writer.write(*lines)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class CsvSink:
    """One row per step, one column per metric; a metric that appears later gets a column then."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Rows are added to a table that is there already."""
        self.path = Path(path)
        self._columns: list[str] = []
        if self.path.exists():
            with open(self.path, newline="") as stream:
                self._columns = next(csv.reader(stream), [])

    def write(self, metrics: StepMetrics) -> None:
        """Append one row. Raises OSError."""
        row = {"step": str(metrics.step), **{name: repr(float(value)) for name, value in metrics.metrics.items()}}
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        self._append([row.get(name, "") for name in self._columns])

    def _widen(self, new: list[str]) -> None:
        rows = []
        if self.path.exists():
            with open(self.path, newline="") as stream:
                rows = list(csv.reader(stream))[1:]
        columns = self._columns + new
        text = io.StringIO(newline="")
        csv.writer(text).writerows([columns, *(row + [""] * (len(columns) - len(row)) for row in rows)])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, text.getvalue().encode())
        self._columns = columns

    def _append(self, row: list[str]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text).writerow(row)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            write_all(fd, text.getvalue().encode())
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing is left open between rows."""


class TensorBoardSink:
    """Scalars in an event file that TensorBoard reads. Needs the `tensorboard` package; does not load torch."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Raises ConfigError when tensorboard is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("track_metrics 'tensorboard' needs the package: pip install tensorboard")
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}"
        self.path = next(path for number in range(10_000) if not (path := folder / f"{name}.{number}").exists())
        self._fd: int | None = None
        self._versioned = False

    def write(self, metrics: StepMetrics) -> None:
        """Append the scalars of one step. Raises OSError."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.metrics.items()
            if math.isfinite(value)
        ]
        event = Event(wall_time=time.time(), step=metrics.step, summary=Summary(value=values))
        self._append(event.SerializeToString())

    def _append(self, data: bytes) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if not self._versioned:
            version = Event(wall_time=time.time(), file_version="brain.Event:2")
            write_all(self._fd, _record(version.SerializeToString()))
            self._versioned = True
        write_all(self._fd, _record(data))

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _record(data: bytes) -> bytes:
    """A TFRecord: length, its checksum, the data, its checksum (TensorFlow's record format)."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


SINKS: dict[str, Callable[[RunFolder], Sink]] = {
    "tensorboard": lambda folder: TensorBoardSink(folder.root / "tensorboard"),
    "csv": lambda folder: CsvSink(folder.root / "metrics.csv"),
}


def check_sinks(names: Sequence[str]) -> tuple[str, ...]:
    """The names, checked. Raises ConfigError for an unknown one or a package that is not installed."""
    if isinstance(names, str):
        names = (names,)
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"track_metrics has no {name!r}; known: {', '.join(SINKS)}")
    if "tensorboard" in names and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("track_metrics 'tensorboard' needs the package: pip install tensorboard")
    return tuple(dict.fromkeys(names))
