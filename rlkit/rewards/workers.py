"""Calls in processes of their own: slow functions run side by side, and a call that does not end can be ended.

The processes are loky's plain ones: new interpreters that do not run the main module again, so that functions of a
notebook cell or of a script without a guard can be called. Functions and arguments travel pickled by value.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle

from rlkit.errors import RewardError
from rlkit.rewards.calls import Call, Outcome, timed_out
from rlkit.rewards.travel import pickled
from rlkit.rewards.worker import serve

__all__ = ["WorkerPool"]

_LOOK_S = 0.1
"""Seconds between two looks while waiting; an interrupt is noticed within this time."""

_START_S = 120.0
"""Seconds that a process may take to start and import what the function needs."""

_FIRST = 100
"""Priority among what is done when the interpreter ends: before it waits for processes."""


class _Worker:
    """One process, and the call that it is busy with."""

    def __init__(self, function: bytes) -> None:
        from loky.backend import get_context

        self.connection, theirs = Pipe()
        reading, self._lifeline = Pipe(duplex=False)
        self._process = get_context("loky").Process(target=serve, args=(theirs, reading, function))
        self._process.start()
        theirs.close()
        reading.close()
        self.ready = False
        self.task: tuple[int, Call] | None = None
        """Position and call that it is busy with."""
        self.since = time.perf_counter()
        """When it was started, or its call began."""
        self.begun = False

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def lives(self) -> bool:
        return bool(self._process.is_alive())

    def send(self, position: int, call: Call) -> None:
        """Hand over a call."""
        self.task, self.begun, self.since = (position, call), False, time.perf_counter()
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died: `wait` says so at once
            self.connection.send_bytes(cloudpickle.dumps((call.positional, call.named)))

    def kill(self) -> int | None:
        """End the process and those that it has started; returns its exit code."""
        if self.lives:  # not yet waited for, so that the id is still its own
            for end in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    end(self.pid, signal.SIGKILL)
        self._process.join()
        self.connection.close()
        self._lifeline.close()
        code: int | None = self._process.exitcode
        return code


class WorkerPool:
    """Up to `workers` processes that call one function; started when there is something to call.

    Args:
        fn: the reward function; must be picklable by value, and keeps no state that the caller needs.
        name: of the reward, for messages.
        limit: seconds a call, from when the function is entered; a process that takes longer is killed. None: no limit.
        workers: most processes at a time.

    Raises:
        RewardError: the function cannot be pickled.
    """

    def __init__(self, fn: Callable[..., Any], name: str, limit: float | None, workers: int) -> None:
        self.fn = fn
        self.name = name
        self.limit = limit
        self.workers = workers
        try:
            self._function = pickled(fn)
        except Exception as error:
            raise RewardError(
                f"reward {name!r} cannot be sent to another process, which a timeout or workers need: "
                f"{type(error).__name__}: {error}. Open files, locks and connections inside the function, or write it "
                "as `async def`"
            ) from error
        self._alive: list[_Worker] = []
        self._finalize = Finalize(self, _kill, args=(self._alive,), exitpriority=_FIRST)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that are there."""
        return [worker.pid for worker in self._alive]

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Outcome]]:
        """See `Calls.run`.

        Raises:
            RewardError: an argument cannot be pickled, or a process does not come up with the function.
        """
        waiting = deque(enumerate(calls))
        self._drop(
            *[worker for worker in self._alive if not worker.lives]
        )  # ended while idle, which is no call's fault
        done = False
        try:
            while waiting or any(worker.task is not None for worker in self._alive):
                self._assign(waiting)
                yield from self._ended()
            done = True
        finally:
            if not done:  # given up in the middle
                self._drop(*[worker for worker in self._alive if worker.task is not None or not worker.ready])

    def close(self) -> None:
        """See `Calls.close`."""
        _kill(self._alive)

    def _assign(self, waiting: deque[tuple[int, Call]]) -> None:
        """Give calls to idle processes, and start as many as are missing."""
        for worker in self._alive:
            if waiting and worker.ready and worker.task is None:
                position, call = waiting.popleft()
                try:
                    worker.send(position, call)
                except (pickle.PicklingError, TypeError, AttributeError) as error:
                    raise RewardError(
                        f"an argument of reward {self.name!r} cannot be sent to a process{call.where}: {error}"
                    ) from error
        starting = sum(not worker.ready for worker in self._alive)
        for _ in range(min(len(waiting) - starting, self.workers - len(self._alive))):
            self._alive.append(_Worker(self._function))

    def _ended(self) -> Iterator[tuple[int, Outcome]]:
        """Wait a little for news, and yield the calls that have ended."""
        active = {worker.connection: worker for worker in self._alive if worker.task is not None or not worker.ready}
        for connection in wait(list(active), timeout=self._patience(list(active.values()))):
            worker = active[connection]  # type: ignore[index]  # `wait` gives back what it was given
            yield from self._heard(worker)
        now = time.perf_counter()
        for worker in [w for w in self._alive if not w.ready and now - w.since > _START_S]:
            self._drop(worker)
            raise RewardError(f"a process for reward {self.name!r} was not ready within {_START_S:g} s; see its output")
        for worker in list(self._alive):
            limit, late = self.limit, now - worker.since
            if limit is not None and worker.task is not None and worker.begun and late > limit:
                position, call = worker.task
                self._drop(worker)
                yield position, timed_out(call, limit, late)

    def _patience(self, active: Sequence[_Worker]) -> float:
        """Seconds until the first limit, at most a look."""
        if self.limit is None:
            return _LOOK_S
        now = time.perf_counter()
        return max(
            0.0, min([_LOOK_S, *(self.limit - (now - w.since) for w in active if w.task is not None and w.begun)])
        )

    def _heard(self, worker: _Worker) -> Iterator[tuple[int, Outcome]]:
        """Take one message."""
        try:
            kind, *rest = cloudpickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            yield from self._died(worker)
            return
        task = worker.task
        if kind == "broken":
            self._drop(worker)
            raise RewardError(
                f"reward {self.name!r} cannot be loaded in another process ({rest[0]}); what it uses must be "
                "importable there or defined beside it"
            )
        if kind == "ready":
            worker.ready = True
        elif kind == "begun":
            worker.begun, worker.since = True, time.perf_counter()
        elif task is not None:
            worker.task = None
            yield task[0], _outcome(task[1], kind, *rest)

    def _died(self, worker: _Worker) -> Iterator[tuple[int, Outcome]]:
        task, seconds = worker.task, time.perf_counter() - worker.since
        code = self._drop(worker)
        if task is None:
            raise RewardError(f"a process for reward {self.name!r} ended with exit code {code} before it was ready")
        position, call = task
        reason = f"ended its process with exit code {code}{call.where}"
        yield position, Outcome(seconds, failure="error", reason=reason)

    def _drop(self, *workers: _Worker) -> int | None:
        """Kill these; returns the exit code of the last."""
        code = None
        for worker in workers:
            self._alive.remove(worker)
            code = worker.kill()
        return code


def _outcome(call: Call, kind: str, seconds: float, *rest: Any) -> Outcome:
    if kind == "raised":
        name, text, trace = rest
        return Outcome(seconds, failure="error", reason=f"raised {name}{call.where}: {text}", trace=trace)
    try:
        return Outcome(seconds, cloudpickle.loads(rest[0]))
    except Exception as error:
        reason = f"returned something that cannot be read here{call.where}: {type(error).__name__}: {error}"
        return Outcome(seconds, failure="error", reason=reason)


def _kill(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()
