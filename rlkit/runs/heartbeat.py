"""Keeps status.json true, also while a step takes minutes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import psutil

from rlkit.runs.events import plain
from rlkit.runs.layout import RunFolder, read_json, write_status
from rlkit.runs.protocol import RunState

PERIOD_S = 1.0


def initial_status(folder: RunFolder, total_steps: int | None, step: int) -> dict[str, Any]:
    """The status of a run whose driver is about to start."""
    now, before = time.time(), read_json(folder.status)
    return {
        "state": "starting",
        "step": step,
        "total_steps": total_steps,
        "pid": None,
        "process_started": None,
        "host": socket.gethostname(),
        "heartbeat": now,
        "started": before.get("started", now),
        "reason": "",
        "settings": {},
        "run": folder.name,
        "came_up": before.get("came_up", False),
        "parked": False,
    }


class Heartbeat:
    """The one writer of status.json. `update` writes at once; a thread writes again each second."""

    def __init__(self, folder: RunFolder, status: dict[str, Any]) -> None:
        """`status`: what is written first; process and host are filled in."""
        self._folder = folder
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._status = {
            **status,
            "pid": os.getpid(),
            "process_started": psutil.Process().create_time(),
            "host": socket.gethostname(),
            "parked": False,
        }
        self._thread = threading.Thread(target=self._beat, name="rlkit-heartbeat", daemon=True)

    def start(self) -> None:
        """Write the status and keep it fresh."""
        self._write()
        self._thread.start()

    @property
    def state(self) -> RunState:
        """The state as last set."""
        state: RunState = self._status["state"]
        return state

    @property
    def reason(self) -> str:
        """Why the run is in that state; "" when there is nothing to say."""
        return str(self._status["reason"])

    def update(self, *, settings: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Change fields and write them. A full disk is passed over: the next beat tries again."""
        with self._lock:
            self._status.update(fields)
            if settings is not None:
                self._status["settings"] = plain(settings)
        self._write()

    def _write(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._status["heartbeat"] = time.time()
            write_status(self._folder, self._status)

    def _beat(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._write()

    def close(self, *, parked: bool = False) -> None:
        """End the thread and write a last time. `parked`: nobody drives the run for now, on purpose."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.update(parked=parked)
