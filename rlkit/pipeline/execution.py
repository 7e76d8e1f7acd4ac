"""One run of a pipeline: which thread runs which controller, how rows stream, and how everything stops."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from rlkit.batch import RolloutBatch
from rlkit.controllers.base import Controller, FieldValues
from rlkit.errors import DataflowError
from rlkit.fields import Field
from rlkit.pipeline.failures import clear_frames, name_error
from rlkit.pipeline.streaming import StreamReader, check_emitted
from rlkit.pipeline.threads import Stopped, ThreadGroup

if TYPE_CHECKING:
    from rlkit.pipeline import SpanTracker

__all__ = ["Execution", "Task"]


@dataclass(frozen=True)
class Task:
    """One controller as a pipeline runs it."""

    controller: Controller
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    after: frozenset[Controller]
    """Controllers that must be done first."""
    streams_from: Controller | None
    """The producer whose finished rows it can read early, if it can read everything from there and from before."""

    @property
    def name(self) -> str:
        """The controller's name."""
        return self.controller.name


class Execution:
    """State of one run, which changes only while `_lock` is held.

    The calling thread runs tasks itself, heavy ones first; what is ready besides gets a thread of its own. A thread
    that finishes a task starts what has become ready, and leaves in the inbox what the calling thread is to do next.
    `_lock` and the inbox are taken and waited for in C, so that an interrupt cannot leave them half taken.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        specs: Mapping[str, Field],
        tracker: "SpanTracker | None",
        batch: RolloutBatch,
    ) -> None:
        self._tasks = tuple(tasks)
        self._specs = specs
        self._tracker = tracker
        self._start: RolloutBatch | None = batch
        self._lock = threading.RLock()
        self._merged: RolloutBatch | None = batch
        self._waiting = list(tasks)
        self._running: list[Task] = []
        self._done: set[Controller] = set()
        self._devices = {task.controller: task.controller.device for task in tasks if task.controller.heavy}
        self._busy: set[str] = set()
        self._readers: dict[Controller, list[tuple[Task, StreamReader]]] = {}
        self._threads = ThreadGroup()
        self._inbox: SimpleQueue[Task | None] = SimpleQueue()
        self._caller = threading.get_ident()
        self._caller_free = True
        self._failure: BaseException | None = None

    def run(self) -> RolloutBatch:
        """Run every task; see `Pipeline.run`."""
        try:
            try:
                with self._lock:
                    self._dispatch()
                while (task := self._inbox.get()) is not None and self._failure is None:
                    self._perform(task)
            except BaseException as error:
                self._fail(error)
        finally:
            interrupt = self._threads.join(isinstance(self._failure, KeyboardInterrupt), self._wake)
            self._failure = self._failure or interrupt
        if self._failure is not None:
            failure, self._failure = self._failure, None
            try:
                clear_frames(failure)
                raise failure
            finally:
                del failure, interrupt
        return self._result()

    def release(self) -> None:
        """Let go of the batch and all results, also while an exception still holds frames of this run."""
        self._start = self._merged = self._failure = None
        self._readers.clear()

    def _dispatch(self) -> None:
        """Start everything that can run now; tell the calling thread when nothing is left. Lock held."""
        ready = [task for task in self._waiting if task.after <= self._done]
        for task in sorted(ready, key=lambda task: task.controller not in self._devices):
            if self._failure is not None or task not in self._waiting or not self._claim(task):
                continue
            self._open_streams(task)
            if self._caller_free:
                self._caller_free = False
                self._inbox.put(task)
            else:
                self._threads.start(task.name, partial(self._perform, task))
        if not self._running:
            self._inbox.put(None)

    def _claim(self, task: Task) -> bool:
        """Mark a task as running, unless its device is taken. Lock held."""
        device = self._devices.get(task.controller)
        if device in self._busy:
            return False
        if device is not None:
            self._busy.add(device)
        self._waiting.remove(task)
        self._running.append(task)
        return True

    def _open_streams(self, producer: Task) -> None:
        """Start the controllers that read rows of `producer` as they finish. Lock held."""
        if type(producer.controller).run_streaming is Controller.run_streaming:
            return
        for task in [task for task in self._waiting if task.streams_from is producer.controller]:
            before = [name for name in task.reads if name not in producer.writes]
            start = self._view(before)
            if {"T", "L"} & {letter for name in start.names for letter in start.specs[name].dims}:
                continue
            if self._claim(task):
                needed = [name for name in task.reads if name in producer.writes]
                reader = StreamReader(producer.name, start, needed, self._specs)
                self._readers.setdefault(producer.controller, []).append((task, reader))
                self._threads.start(task.name, partial(self._perform, task, reader))
                if self._failure is not None:  # it came too early for `_wake` to find the reader
                    reader.stop()

    def _perform(self, task: Task, reader: StreamReader | None = None) -> None:
        """Run one task to its end, in whichever thread; failures are kept for the calling thread."""
        try:
            if self._failure is not None:  # it came while this thread was starting
                raise Stopped
            fields = self._compute(task) if reader is None else reader.run(partial(self._call_on_rows, task))
            with self._lock:
                self._merge(task, fields)
                self._running.remove(task)
                self._busy.discard(self._devices.get(task.controller, ""))
                self._done.add(task.controller)
                self._caller_free |= threading.get_ident() == self._caller
                self._dispatch()
        except Stopped:
            self._fail(RuntimeError(f"controller '{task.name}' was stopped"))
        except BaseException as error:
            self._fail(name_error(task.name, error))

    def _compute(self, task: Task) -> Mapping[str, Any]:
        with self._lock:
            view = self._view(task.reads)
            has_readers = task.controller in self._readers
        if not has_readers:
            return self._call(task, view)
        emitted: set[int] = set()
        with torch.no_grad(), self._span(task):
            result = task.controller.run_streaming(view, partial(self._emit, task, emitted))
        return check_result(task, result)

    def _emit(self, task: Task, emitted: set[int], indices: Sequence[int], fields: FieldValues) -> None:
        """Hand finished rows of `task` to their readers. A method, since a closure's cells outlive a cleared frame."""
        start = self._start
        if start is None or self._failure is not None:
            raise Stopped
        rows = check_emitted(task.writes, start.batch_size, emitted, indices, fields)
        for _, reader in self._readers[task.controller]:
            reader.put(rows, fields)

    def _call(self, task: Task, view: RolloutBatch) -> Mapping[str, Any]:
        with torch.no_grad(), self._span(task):
            result = task.controller.run(view)
        return check_result(task, result)

    def _call_on_rows(self, task: Task, rows: RolloutBatch) -> Mapping[str, Any]:
        """The controller's columns for some rows, checked against these rows."""
        result = self._call(task, rows)
        checked = rows.with_fields(result, self._specs_of(result))
        return {name: checked[name] for name in task.writes}

    def _merge(self, task: Task, fields: Mapping[str, Any]) -> None:
        """Add a task's columns, and let the readers of its rows finish. Lock held."""
        assert self._merged is not None
        self._merged = self._merged.with_fields(fields, self._specs_of(fields))
        for reading, reader in self._readers.get(task.controller, []):
            reader.close(self._view(reading.reads))

    def _view(self, reads: Iterable[str]) -> RolloutBatch:
        """What a controller sees: the fields the batch started with, and those it reads. Lock held."""
        assert self._start is not None
        assert self._merged is not None
        written = {name: self._merged[name] for name in reads if name not in self._start}
        return self._start.with_fields(written, self._specs_of(written))

    def _result(self) -> RolloutBatch:
        with self._lock:
            return self._view(name for task in self._tasks for name in task.writes)

    def _specs_of(self, names: Iterable[str]) -> list[Field]:
        return [self._specs[name] for name in names]

    def _span(self, task: Task) -> AbstractContextManager[Any]:
        return nullcontext() if self._tracker is None else self._tracker.span(task.name)

    def _fail(self, error: BaseException) -> None:
        """Keep the first failure and wake everybody, so that nothing new starts."""
        if self._failure is None:
            self._failure = error
        self._wake()

    def _wake(self) -> None:
        """Make the calling thread and the readers of rows look whether to stop."""
        self._inbox.put(None)
        for readers in tuple(self._readers.values()):
            for _, reader in readers:
                reader.stop()


def check_result(task: Task, result: object) -> Mapping[str, Any]:
    """What a controller returned, if it is a mapping of exactly the fields it declares.

    Raises:
        DataflowError: it is not; the message names the controller and the fields.
    """
    if not isinstance(result, Mapping):
        raise DataflowError(
            f"run returned {type(result).__name__}; expected a dict with the fields {', '.join(task.writes)}"
        )
    missing = [name for name in task.writes if name not in result]
    if missing:
        raise DataflowError(f"run did not return {', '.join(map(repr, missing))}, which its writes declare")
    extra = [name for name in result if name not in task.writes]
    if extra:
        raise DataflowError(
            f"run returned {', '.join(map(repr, extra))}, which its writes do not declare; add it there"
        )
    return {name: result[name] for name in task.writes}
