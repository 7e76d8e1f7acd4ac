"""Telling a live driver from a dead one."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlkit.runs.layout import DriverLock, RunFolder
from rlkit.runs.liveness import describe_exit, live_status, log_tail, process_is_alive


def status(age: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A status.json of this process whose last heartbeat was `age` seconds ago."""
    return {
        "state": "running",
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        "host": socket.gethostname(),
        "heartbeat": time.time() - age,
        "reason": "",
        **changes,
    }


def test_a_driver_that_holds_its_lock_is_alive(tmp_path: Path):
    folder = RunFolder(tmp_path)
    with DriverLock(folder):
        found = live_status(folder, status())
    assert found["alive"]
    assert found["state"] == "running"
    assert found["heartbeat_age_s"] < 5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pid": 2**22 + 1}, "died without a word"),
        ({"process_started": 1.0}, "died without a word"),  # another process has that number now
        ({"host": "elsewhere", "age": 60}, "no sign of life from elsewhere for 60 s"),
        ({"pid": None, "state": "starting", "age": 300}, "did not start within 300 s"),
    ],
)
def test_a_dead_driver_is_a_failed_run(tmp_path: Path, changes: dict[str, Any], reason: str):
    folder = RunFolder(tmp_path)
    with DriverLock(folder):
        found = live_status(folder, status(**changes))
    assert (found["state"], found["alive"]) == ("failed", False)
    assert reason in found["reason"]


def test_a_process_without_the_lock_does_not_drive(tmp_path: Path):
    found = live_status(RunFolder(tmp_path), status())
    assert found["state"] == "failed"
    assert "no longer holds the run" in found["reason"]


def test_a_driver_on_another_machine_is_known_by_its_heartbeat(tmp_path: Path):
    assert live_status(RunFolder(tmp_path), status(host="elsewhere", pid=2**22 + 1))["alive"]


def test_a_driver_that_hangs_is_alive_and_silent(tmp_path: Path):
    folder = RunFolder(tmp_path)
    with DriverLock(folder):
        found = live_status(folder, status(age=40))
    assert found["alive"]
    assert found["reason"] == "the driver is there but has been silent for 40 s"


@pytest.mark.parametrize("state", ["stopped", "finished", "failed"])
def test_a_run_that_ended_is_not_alive_and_keeps_its_state(tmp_path: Path, state: str):
    found = live_status(RunFolder(tmp_path), status(state=state, pid=2**22 + 1, reason="why"))
    assert (found["state"], found["alive"], found["reason"]) == (state, False, "why")


def test_a_run_that_was_parked_is_paused_and_not_alive(tmp_path: Path):
    found = live_status(RunFolder(tmp_path), status(state="paused", parked=True))
    assert (found["state"], found["alive"]) == ("paused", False)


def test_a_zombie_is_dead():
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 30
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not process_is_alive(process.pid)
    process.wait()
    assert not process_is_alive(process.pid)
    assert process_is_alive(os.getpid())


def test_exit_codes_in_words():
    assert describe_exit(-signal.SIGKILL) == "the driver process died (signal SIGKILL)"
    assert describe_exit(-63) == "the driver process died (signal 63)"
    assert describe_exit(1) == "the driver process ended with exit code 1"


def test_the_end_of_a_log(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert log_tail(folder) == ""
    folder.log.write_text("".join(f"line {number}\n" for number in range(10_000)))
    assert log_tail(folder, 2) == "line 9998\nline 9999"
