"""Threads that belong to one piece of work: started together, waited for together, and stopped by an interrupt."""

import contextvars
import ctypes
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

__all__ = ["Stopped", "ThreadGroup"]

_GRACE_S = 0.2
"""Seconds that a thread gets to end by itself after an interrupt, before its Python code is stopped."""

_POLL_S = 0.005
"""Seconds between two looks at whether the threads have ended after an interrupt."""


class Stopped(Exception):  # noqa: N818 - no error: it carries a stop through code that is not to go on
    """Raised inside a controller because another one failed or the caller was interrupted."""


class ThreadGroup:
    """Threads of one run. They are daemons, so that one that cannot be stopped does not keep the process.

    Waiting goes through `SimpleQueue`, whose calls an interrupt leaves either done or not done; the Python code of
    `threading.Condition` can be interrupted with its lock taken.
    """

    def __init__(self) -> None:
        self._threads: list[tuple[threading.Thread, str]] = []
        self._ended: SimpleQueue[None] = SimpleQueue()

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Run `target` in a new thread, with the context variables of the one that asks for it.

        `target` handles its own errors; only `Stopped` may leave it.
        """
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._run, target), name=f"rlkit-{name}", daemon=True)
        self._threads.append((thread, name))
        thread.start()

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
                    for _ in self._threads:
                        self._ended.get()
                    for thread, _ in self._threads:
                        thread.join()
                return last
            except KeyboardInterrupt as error:
                interrupts, last = interrupts + 1, error
                if interrupts > 1:
                    self._warn()
                    return last

    def _run(self, target: Callable[[], None]) -> None:
        try:
            with suppress(Stopped):
                target()
        finally:
            self._ended.put(None)

    def _stop(self, wake: Callable[[], None]) -> None:
        """Stop what does not end by itself. Takes no lock and joins nothing: a stopped thread may hold a lock."""
        wake()
        deadline = time.monotonic() + _GRACE_S
        while alive := [thread for thread, _ in self._threads if thread.is_alive()]:
            if time.monotonic() > deadline:
                for thread in alive:
                    _raise_inside(thread, Stopped)
                wake()
                deadline = time.monotonic() + _GRACE_S
            time.sleep(_POLL_S)

    def _warn(self) -> None:
        names = ", ".join(f"'{name}'" for thread, name in self._threads if thread.is_alive())
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
