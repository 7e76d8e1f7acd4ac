"""Is anybody driving this run? From the heartbeat, the process and the lock; from any process on any machine."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import psutil

from rlkit.runs.layout import RunFolder, lock_is_held
from rlkit.runs.protocol import LIVE_STATES

SILENCE_S = 15.0
"""Heartbeats come every second; after this long without one, a driver on another machine counts as dead."""


def live_status(folder: RunFolder, status: dict[str, Any]) -> dict[str, Any]:
    """`status` as it is now rather than as it was written last.

    Adds "alive" (a driver is there and answers requests), "heartbeat_age_s" and "died". A run that should be live but
    whose driver died gets the state "failed" and a reason.
    """
    age = max(0.0, time.time() - float(status.get("heartbeat") or 0.0))
    found = {**status, "alive": False, "died": False, "heartbeat_age_s": age}
    if status.get("state") not in LIVE_STATES or status.get("parked"):
        return found
    problem = _problem(folder, status, age)
    if problem:
        return {**found, "state": "failed", "reason": problem, "died": True}
    if age > SILENCE_S:
        found["reason"] = status.get("reason") or f"the driver is there but has been silent for {age:.0f} s"
    return {**found, "alive": True}


def _problem(folder: RunFolder, status: dict[str, Any], age: float) -> str:
    """Why the driver counts as dead; "" when it is alive."""
    pid, host = status.get("pid"), status.get("host")
    if host != socket.gethostname():
        return f"no sign of life from {host} for {age:.0f} s" if age > SILENCE_S else ""
    if pid is None:  # the driver is being started
        return f"the driver did not start within {age:.0f} s" if age > 4 * SILENCE_S else ""
    if not process_is_alive(int(pid), status.get("process_started")):
        return f"the driver process {pid} died without a word (killed, out of memory, or the machine restarted)"
    if not lock_is_held(folder):
        return f"the driver process {pid} no longer holds the run"
    return ""


def process_is_alive(pid: int, started: float | None = None) -> bool:
    """Whether that process runs; `started` (unix seconds) tells it from a later one with the same number."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return started is None or abs(process.create_time() - started) < 2.0
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "it ended in an unknown way"
    if code < 0:
        try:
            return f"the driver process died (signal {signal.Signals(-code).name})"
        except ValueError:
            return f"the driver process died (signal {-code})"
    return f"the driver process ended with exit code {code}"


def log_tail(folder: RunFolder, lines: int = 20) -> str:
    """The last lines of log.txt; "" when there is none."""
    try:
        with open(folder.log, "rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 500 * lines))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
