"""Async reward functions on an event loop of rlkit's own thread, so that a loop which already runs is no hindrance."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from rlkit.errors import RewardError
from rlkit.rewards.calls import Call, Outcome, failed, timed_out

__all__ = ["EventLoopCalls"]

_LOOK_S = 0.1
"""Seconds between two looks at the loop while waiting; an interrupt is noticed within this time."""

_DEAF_S = 1.0
"""Seconds beyond the limit of a call after which a loop that does nothing else is taken to be blocked."""

_Finished = SimpleQueue[tuple[int, Outcome]]


class EventLoopCalls:
    """Awaits calls at the same time, on one loop for as long as this object lives.

    Args:
        fn: the async function.
        limit: seconds a call; one that takes longer is cancelled. None lets it take as long as it does.
        max_concurrent: calls that run at the same time.
    """

    def __init__(self, fn: Callable[..., Any], limit: float | None, max_concurrent: int) -> None:
        self.fn = fn
        self.limit = limit
        self.max_concurrent = max_concurrent
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Outcome]]:
        """See `Calls.run`.

        A function that blocks the loop (`time.sleep` rather than `await asyncio.sleep`) cannot be cancelled: its loop
        is left behind, the sample counts as timed out, and the others are called again on a new one.
        """
        open_calls = dict(enumerate(calls))
        while open_calls:
            loop = self._running_loop()
            finished: _Finished = SimpleQueue()
            running: dict[asyncio.Task[Any], int] = {}
            future = asyncio.run_coroutine_threadsafe(self._all(dict(open_calls), running, finished), loop)
            try:
                while open_calls and (ended := self._next(finished, loop)) is not None:
                    del open_calls[ended[0]]
                    yield ended
            finally:
                future.cancel()
            if open_calls:
                yield from self._left_behind(loop, running, open_calls)

    def close(self) -> None:
        """See `Calls.close`."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            _stop(loop)
            if thread is not threading.current_thread():
                thread.join(_DEAF_S)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name="rlkit-async-reward", daemon=True)
            self._thread.start()
            weakref.finalize(self, _stop, self._loop)
        return self._loop

    def _next(self, finished: _Finished, loop: asyncio.AbstractEventLoop) -> tuple[int, Outcome] | None:
        """The next call that ends; None when the loop is blocked."""
        heard = threading.Event()
        asked = time.perf_counter()
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(heard.set)
        while True:
            with suppress(Empty):
                return finished.get(timeout=_LOOK_S)
            if self._thread is None or not self._thread.is_alive():
                raise RewardError(
                    "the event loop of an async reward ended while calls were running; it must not be stopped, and "
                    "SystemExit and KeyboardInterrupt must not leave the function"
                )
            if heard.is_set():
                heard, asked = threading.Event(), time.perf_counter()
                loop.call_soon_threadsafe(heard.set)
            elif self.limit is not None and time.perf_counter() - asked > self.limit + _DEAF_S:
                return None

    def _left_behind(
        self, loop: asyncio.AbstractEventLoop, running: dict[asyncio.Task[Any], int], open_calls: dict[int, Call]
    ) -> Iterator[tuple[int, Outcome]]:
        """The outcome of the call that blocks the loop, which is abandoned; of all that are open if it is not known."""
        assert self.limit is not None
        task = asyncio.current_task(loop)
        culprit = None if task is None else running.get(task)
        _stop(loop)
        self._loop = self._thread = None
        for position in list(open_calls) if culprit not in open_calls else [culprit]:
            call = open_calls.pop(position)
            slow = timed_out(call, self.limit, self.limit)
            hint = "; it blocks the event loop: await what takes time, or give it processes with workers=1"
            yield position, Outcome(slow.seconds, failure="timeout", reason=slow.reason + hint)

    async def _all(self, calls: dict[int, Call], running: dict[asyncio.Task[Any], int], finished: _Finished) -> None:
        gate = asyncio.Semaphore(self.max_concurrent)

        async def one(position: int, call: Call) -> None:
            async with gate:
                finished.put((position, await self._outcome(position, call, running)))

        await asyncio.gather(*(one(position, call) for position, call in calls.items()))

    async def _outcome(self, position: int, call: Call, running: dict[asyncio.Task[Any], int]) -> Outcome:
        started = time.perf_counter()
        task = asyncio.ensure_future(self._made(call))
        running[task] = position
        task.add_done_callback(lambda done: running.pop(done, None))
        try:
            # Not `wait_for`, which waits for a cancelled call to agree.
            done, _ = await asyncio.wait({task}, timeout=self.limit)
        finally:
            if not task.done():
                task.cancel()
        seconds = time.perf_counter() - started
        if not done:
            assert self.limit is not None
            return timed_out(call, self.limit, seconds)
        error = asyncio.CancelledError("it was cancelled") if task.cancelled() else task.exception()
        return Outcome(seconds, task.result()) if error is None else failed(call, error, seconds)

    async def _made(self, call: Call) -> Any:
        return await call.make(self.fn)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # it has ended already
        loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then cancel what is left on it."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_DEAF_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
