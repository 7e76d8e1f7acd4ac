"""Processes of reward functions end with the process that started them, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import re, sys, time
from rlkit.rewards import RewardCaller, RewardFunction

print("main module runs", flush=True)

def reward(response):
    if response == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if response == "sleep":
        time.sleep(100)
    return 1.0

caller = RewardCaller(RewardFunction(reward), workers=2)
print(caller.score(["p"] * 2, ["a", "b"], [{}] * 2), flush=True)
"""
STUCK = SCRIPT + 'caller.score(["p"] * 2, ["regex", "sleep"], [{}] * 2)\n'


def started(path: Path, script: str) -> subprocess.Popen[str]:
    path.write_text(script)
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers(pid: int, count: int) -> list[psutil.Process]:
    """The processes that call the function, once there are so many and all of them are busy."""
    for _ in range(400):
        found = [p for p in psutil.Process(pid).children() if "popen_loky" in " ".join(p.cmdline())]
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{count} processes expected, found {found}")


def test_a_script_without_a_guard_runs_once_and_leaves_nothing(tmp_path: Path) -> None:
    process = started(tmp_path / "script.py", SCRIPT)
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("main module runs\n[1.0, 1.0]\n", "")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_when_their_parent_is_killed_even_amid_a_regular_expression(tmp_path: Path, end: int) -> None:
    process = started(tmp_path / "script.py", STUCK)
    assert process.stdout is not None
    assert process.stdout.readline() == "main module runs\n"
    assert process.stdout.readline() == "[1.0, 1.0]\n"
    time.sleep(0.5)
    found = workers(process.pid, 2)
    os.kill(process.pid, end)
    process.communicate(timeout=20)
    gone, left = psutil.wait_procs(found, timeout=5)
    for stray in left:
        stray.kill()
    assert len(gone) == 2
