"""The process that calls a reward function for another one; see `rlkit.rewards.workers`."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import os
import signal
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

__all__ = ["serve"]


def serve(connection: Connection, lifeline: Connection, function: bytes) -> None:
    """Answer calls until the other end hangs up.

    Messages out, all pickled: ("ready",) or ("broken", reason) once; then for each call ("begun",) followed by
    ("answer", seconds, pickled answer) or ("raised", seconds, type, text, traceback).

    Args:
        connection: where calls come in, each the pickled (fn's positional, fn's named arguments).
        lifeline: reading end of a pipe that nobody writes to, and whose other end the parent alone holds.
        function: the pickled reward function.
    """
    die_with_parent(lifeline)
    try:
        fn = cloudpickle.loads(function)
    except BaseException as error:
        connection.send(("broken", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready",))
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(_reply(connection, fn, request))


def die_with_parent(lifeline: Connection) -> None:
    """Makes this process and those it starts a group that ends when the parent does, however busy it is.

    The kernel sends SIGIO, which ends a process, to the group when the pipe's other end is closed: also when the
    parent was killed, and also while a regular expression holds the interpreter. Interrupts of a terminal or a
    notebook are for the parent and do not reach the group.
    """
    os.setsid()
    descriptor = lifeline.fileno()
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    if lifeline.poll(0):  # it was closed before the signal was asked for
        os._exit(1)


def _reply(connection: Connection, fn: Any, request: bytes) -> bytes:
    started = time.perf_counter()
    try:
        positional, named = cloudpickle.loads(request)
        connection.send(("begun",))
        started = time.perf_counter()
        answer = fn(*positional, **named)
        if inspect.isawaitable(answer):
            answer = asyncio.run(_awaited(answer))
        seconds = time.perf_counter() - started
        return bytes(cloudpickle.dumps(("answer", seconds, cloudpickle.dumps(answer))))
    except Exception as error:
        seconds = time.perf_counter() - started
        return bytes(cloudpickle.dumps(("raised", seconds, type(error).__name__, str(error), traceback.format_exc())))


async def _awaited(answer: Any) -> Any:
    return await answer
