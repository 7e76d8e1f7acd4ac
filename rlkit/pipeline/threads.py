"""Threads that belong to one piece of work: started together, waited for together, and stopped by an interrupt."""

import contextvars
import ctypes
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

__all__ = ["Stopped", "ThreadGroup"]

_GRACE_S = 0.2
"""Seconds that a thread gets to end by itself after an interrupt, before its Python code is stopped."""

_POLL_S = 0.005
"""Seconds between two looks at whether the threads have ended after an interrupt."""


_START_S = 1.0
"""Seconds after which a thread whose start was interrupted is taken never to come up."""


class Stopped(Exception):  # noqa: N818 - no error: it carries a stop through code that is not to go on
    """Raised inside a controller because another one failed or the caller was interrupted."""


@dataclass
class _Member:
    name: str
    ended: bool = False
    thread: threading.Thread = field(init=False)


class ThreadGroup:
    """Threads of one run. They are daemons, so that one that cannot be stopped does not keep the process.

    Waiting goes through `SimpleQueue`, whose calls an interrupt leaves either done or not done; the Python code of
    `threading.Condition` can be interrupted with its lock taken.
    """

    def __init__(self) -> None:
        self._members: list[_Member] = []
        self._ended: SimpleQueue[None] = SimpleQueue()

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Run `target` in a new thread, with the context variables of the one that asks for it.

        `target` handles its own errors; only `Stopped` may leave it.
        """
        member = _Member(name)
        member.thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run, member, target),
            name=f"rlkit-{name}",
            daemon=True,
        )
        self._members.append(member)
        member.thread.start()

    def join(self, interrupted: bool, wake: Callable[[], None]) -> KeyboardInterrupt | None:
        """Wait for all threads.

        An interrupt makes their Python code stop; a second one gives up on those in the middle of a call into C, with a
        RuntimeWarning that names them.

        Args:
            interrupted: whether an interrupt came already, before this call.
            wake: makes threads that wait for each other go on, so that they notice that they are to stop.

        Returns:
            The interrupt that came while waiting, if any.
        """
        interrupts = int(interrupted)
        last: KeyboardInterrupt | None = None
        while True:
            try:
                if interrupts:
                    self._stop(wake)
                else:
                    for _ in self._members:
                        self._ended.get()
                    for member in self._members:
                        member.thread.join()
                return last
            except KeyboardInterrupt as error:
                interrupts, last = interrupts + 1, error
                if interrupts > 1:
                    self._warn()
                    return last

    def _run(self, member: _Member, target: Callable[[], None]) -> None:
        try:
            with suppress(Stopped):
                target()
        finally:
            member.ended = True
            self._ended.put(None)

    def _stop(self, wake: Callable[[], None]) -> None:
        """Stop what does not end by itself. Takes no lock and joins nothing: a stopped thread may hold a lock."""
        wake()
        now = time.monotonic()
        deadline, all_started = now + _GRACE_S, now + _START_S
        while left := [m for m in self._members if m.thread.is_alive() or (not m.ended and now < all_started)]:
            if now > deadline:
                for member in left:
                    _raise_inside(member.thread, Stopped)
                wake()
                deadline = now + _GRACE_S
            time.sleep(_POLL_S)
            now = time.monotonic()

    def _warn(self) -> None:
        names = ", ".join(f"'{member.name}'" for member in self._members if member.thread.is_alive())
        if names:
            warnings.warn(
                f"gave up waiting for {names}, running in a thread that cannot be stopped; it ends with its current "
                "call, or with this process",
                RuntimeWarning,
                stacklevel=4,
            )


def _raise_inside(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an exception at the next step of a thread's Python code; a call into C is let finish first."""
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))
