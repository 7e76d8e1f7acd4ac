"""Callers of reward functions for tests, and what they need to look at processes."""

from __future__ import annotations

from typing import Any

from rlkit.rewards import RewardCaller, RewardFunction

RESPONSES = [f"r{i}" for i in range(8)]


def score(caller: RewardCaller, count: int = 8) -> list[float]:
    return caller.score([f"prompt {i}" for i in range(count)], RESPONSES[:count], [{"row": i} for i in range(count)])


def caller(fn: Any, **options: Any) -> RewardCaller:
    return RewardCaller(RewardFunction(fn), **options)


def pids(scorer: RewardCaller) -> list[int]:
    return scorer._calls.pids  # type: ignore[union-attr]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
