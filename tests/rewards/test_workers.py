"""Reward functions in processes: side by side, ended at their limit, and what a process that dies costs."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch

from rlkit.errors import RewardError
from tests.rewards.calling import caller, is_alive, pids, score


def test_processes_run_calls_side_by_side_and_are_kept() -> None:
    def slow(response: str) -> int:
        time.sleep(0.3)
        return os.getpid()

    with caller(slow, workers=4) as scorer:
        used = {int(pid) for pid in score(scorer)}
        assert os.getpid() not in used
        started = time.perf_counter()
        again = {int(pid) for pid in score(scorer)}
        taken = time.perf_counter() - started
        assert set(pids(scorer)) >= again
        kept = pids(scorer)
    assert 1 < len(again) <= 4
    assert taken < 0.3 * 8 - 0.5, "eight calls of 0.3 s in several processes, one after the other would be 2.4 s"
    assert not any(map(is_alive, kept))


def test_functions_in_processes_may_be_closures_lambdas_async_and_torch() -> None:
    factor = 3

    async def judge(response: str) -> float:
        await asyncio.sleep(0)
        return factor * len(response)

    with caller(lambda responses: [factor * len(r) for r in responses], workers=1) as scorer:
        assert score(scorer, 2) == [6.0, 6.0]
    with caller(judge, workers=1) as scorer:
        assert score(scorer, 2) == [6.0, 6.0]
    with caller(functools.partial(lambda k, response: k * len(response), 2), workers=1) as scorer:
        assert score(scorer, 2) == [4.0, 4.0]
    with caller(lambda responses: torch.tensor([0.5, 1.5]), workers=1) as scorer:
        assert score(scorer, 2) == [0.5, 1.5]


def test_the_alarm_signal_works_in_a_process_as_it_runs_in_the_main_thread() -> None:
    def alarmed(response: str) -> float:
        def ring(*_: object) -> None:
            raise TimeoutError("its own alarm")

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            time.sleep(0 if response == "r0" else 30)
        except TimeoutError:
            return -1.0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return 1.0

    with caller(alarmed, workers=1) as scorer:
        assert score(scorer, 2) == [1.0, -1.0]


def test_an_exception_in_a_process_is_told_with_its_traceback() -> None:
    def fails(response: str) -> float:
        return {"r0": 1.0}[response]

    with caller(fails, workers=1) as scorer:
        with pytest.raises(RewardError, match="reward 'fails' raised KeyError on sample 1: 'r1'") as caught:
            score(scorer)
        (note,) = caught.value.__notes__
        assert note.startswith("In the process that called it:\nTraceback")
        assert note.endswith(", in fails\nKeyError: 'r1'\n")
        assert score(scorer, 1) == [1.0]


def test_a_process_that_dies_costs_its_sample_only() -> None:
    def deadly(response: str) -> float:
        if response == "r2":
            os.kill(os.getpid(), signal.SIGSEGV)
        return 1.0

    with caller(deadly, workers=2, on_error="abstain") as scorer:
        scores = score(scorer)
        assert [i for i, value in enumerate(scores) if math.isnan(value)] == [2]
        assert scorer.take_failures() == {"timeouts": 0, "errors": 1}
    with caller(deadly, workers=1) as scorer, pytest.raises(RewardError, match="exit code -11 on sample 2"):
        score(scorer)


def test_a_process_that_dies_while_idle_costs_no_sample() -> None:
    with caller(len, workers=1) as scorer:
        assert score(scorer, 2) == [2.0, 2.0]
        (pid,) = pids(scorer)
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        assert score(scorer, 2) == [2.0, 2.0]
        assert pids(scorer) != [pid]


def test_arguments_that_cannot_be_sent_are_named() -> None:
    def fine(response: str, lock: object) -> float:
        return 1.0

    with caller(fine, workers=1) as scorer:
        with pytest.raises(RewardError, match=r"an argument of reward 'fine' cannot be sent to a process on sample 0"):
            scorer.score(["p"], ["r"], [{"lock": threading.Lock()}])
        assert scorer.score(["p"], ["r"], [{"lock": "open"}]) == [1.0]


def test_a_call_that_holds_the_interpreter_is_ended_with_what_it_started(tmp_path: Any) -> None:
    note = tmp_path / "child"

    def endless(response: str) -> float:
        import subprocess

        if response == "r1":
            note.write_text(str(subprocess.Popen(["sleep", "100"]).pid))
            re.match(r"(a+)+$", "a" * 60 + "b")  # 2**60 steps, in C
        return 1.0

    with caller(endless, timeout=0.5, on_error="abstain") as scorer:
        started = time.perf_counter()
        scores = score(scorer, 3)
        assert time.perf_counter() - started < 10
        assert scores[0] == scores[2] == 1.0
        assert math.isnan(scores[1])
        assert scorer.take_failures() == {"timeouts": 1, "errors": 0}
    assert not is_alive(int(note.read_text()))


def test_the_start_of_a_process_does_not_count() -> None:
    class Heavy:
        """Takes longer to load than a call may take."""

        def __call__(self, response: str) -> float:
            return 1.0

        def __reduce__(self) -> Any:
            return _slow_to_load, (Heavy, 1.0)

    with caller(Heavy(), timeout=0.5) as scorer:
        assert score(scorer) == [1.0] * 8


def _slow_to_load(kind: type, seconds: float) -> Any:
    time.sleep(seconds)
    return kind()


def test_a_limit_that_is_reached_raises_unless_asked_otherwise() -> None:
    def slow(response: str) -> float:
        time.sleep(30 if response == "r1" else 0)
        return 1.0

    async def slow_async(response: str) -> float:
        await asyncio.sleep(30 if response == "r1" else 0)
        return 1.0

    for fn, name in ((slow, "slow"), (slow_async, "slow_async")):
        with caller(fn, timeout=0.3) as scorer:
            message = rf"reward '{name}' took longer than its limit of 0\.3 s on sample 1"
            with pytest.raises(RewardError, match=message):
                score(scorer)
            assert score(scorer, 1) == [1.0]


def test_a_replaced_function_is_the_one_that_is_called() -> None:
    with caller(lambda response: 1.0, workers=1) as scorer:
        assert score(scorer, 2) == [1.0, 1.0]
        first = pids(scorer)
        scorer.function.fn = lambda response: 2.0
        assert score(scorer, 2) == [2.0, 2.0]
        assert not any(map(is_alive, first))


def test_a_caller_that_is_dropped_takes_its_processes_along() -> None:
    scorer = caller(len, workers=2)
    score(scorer)
    there = pids(scorer)
    assert there
    assert all(map(is_alive, there))
    del scorer
    assert not any(map(is_alive, there))


def test_an_interrupt_ends_the_calls_that_run_and_the_caller_goes_on_working() -> None:
    def slow(response: str) -> float:
        time.sleep(60 if response == "r1" else 0)
        return 1.0

    with caller(slow, workers=1) as scorer:
        assert score(scorer, 1) == [1.0]
        busy = pids(scorer)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        started = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            score(scorer)
        assert time.perf_counter() - started < 5
        assert not any(map(is_alive, busy))
        assert score(scorer, 1) == [1.0]
