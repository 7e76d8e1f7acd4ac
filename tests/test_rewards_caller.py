"""How reward functions are called: several at a time, in processes, with limits, and what a failed call comes to."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import pickle
import re
import signal
import sys
import threading
import time
from typing import Any

import cloudpickle
import pytest
import torch

from rlkit.errors import ConfigError, RewardError
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout must be seconds above 0, or None for no limit; given 0"),
        ({"timeout": math.inf}, "timeout must be seconds above 0"),
        ({"timeout": "1"}, "timeout must be seconds above 0"),
        ({"workers": -1}, "workers must be a whole number of at least 0, given -1"),
        ({"workers": True}, "workers must be a whole number"),
        ({"on_error": "zero"}, "on_error must be 'raise' or 'abstain', given 'zero'"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, given 0"),
        ({"max_concurrent": 0}, "max_concurrent must be a whole number of at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        caller(len, **options)


# Batches


def test_a_batched_function_is_called_for_at_most_batch_size_samples() -> None:
    sizes: list[int] = []

    def counted(responses: list[str], row: list[int]) -> list[int]:
        sizes.append(len(responses))
        return row

    assert score(caller(counted, batch_size=3)) == [float(i) for i in range(8)]
    assert sizes == [3, 3, 2]
    assert score(caller(counted)) == [float(i) for i in range(8)]
    assert sizes == [3, 3, 2, 8]


def test_a_failure_in_a_later_batch_names_its_samples() -> None:
    def fails(responses: list[str]) -> list[float]:
        if "r4" in responses:
            raise KeyError("r4")
        return [1.0, math.inf, 1.0][: len(responses)] if "r7" in responses else [1.0] * len(responses)

    with pytest.raises(RewardError, match="reward 'fails' raised KeyError on samples 3 to 5: 'r4'"):
        score(caller(fails, batch_size=3))
    scorer = caller(fails, batch_size=3, on_error="abstain")
    scores = score(scorer)
    assert [i for i, value in enumerate(scores) if math.isnan(value)] == [3, 4, 5, 7]
    assert scorer.take_failures() == {"timeouts": 0, "errors": 4}


# What a failed call comes to


def test_abstaining_keeps_the_other_samples_counts_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    def picky(response: str) -> Any:
        if response == "r2":
            raise ValueError("no number in it")
        return {"r5": "high", "r6": math.nan, "r7": None}.get(response, 1.0)

    scorer = caller(picky, on_error="abstain")
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        scores = score(scorer)
    assert [i for i, value in enumerate(scores) if math.isnan(value)] == [2, 5, 6, 7]
    assert scores[:2] + scores[3:5] == [1.0] * 4
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "reward term 'picky' abstains from sample 2 (prompt 'prompt 2'): reward 'picky' raised ValueError on sample 2: "
        "no number in it",
        "reward term 'picky' abstains from sample 5 (prompt 'prompt 5'): reward 'picky' returned str 'high' for sample "
        "5; expected a finite number, or None to abstain",
        "reward term 'picky' abstains from sample 6 (prompt 'prompt 6'): reward 'picky' returned nan for sample 6; "
        "expected a finite number, or None to abstain",
    ]
    assert scorer.take_failures() == {"timeouts": 0, "errors": 3}
    assert scorer.take_failures() == {"timeouts": 0, "errors": 0}


def test_the_log_names_every_failed_sample_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    scorer = caller(lambda response: 1 / 0, on_error="abstain")
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        scorer.score(["p"] * 11, ["r"] * 11, [{}] * 11)
    assert len(caplog.records) == 9
    assert caplog.records[-1].getMessage() == "reward term 'reward' abstains from these samples too: 8, 9, 10"


def test_a_missing_column_is_an_error_under_every_policy() -> None:
    with pytest.raises(RewardError, match="asks for a column 'answer'"):
        score(caller(lambda response, answer: 1.0, on_error="abstain"))


# Async functions


def test_async_calls_run_at_the_same_time_up_to_a_bound() -> None:
    running, most = 0, 0

    async def judge(response: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return float(response[1:])

    for bound, wanted in ((3, 3), (16, 8)):
        most = 0
        with caller(judge, max_concurrent=bound) as scorer:
            assert score(scorer) == [float(i) for i in range(8)]
        assert most == wanted


def test_async_functions_keep_their_loop_from_batch_to_batch_and_close_ends_it() -> None:
    loops = []

    async def judge(responses: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(responses)

    scorer = caller(judge)
    assert score(scorer) == score(scorer) == [1.0] * 8
    assert loops[0] is loops[1]
    scorer.close()
    assert loops[0].is_closed()
    assert not [t for t in threading.enumerate() if t.name == "rlkit-async-reward"]
    assert score(scorer) == [1.0] * 8
    scorer.close()


def test_an_async_call_that_raises_ends_the_others() -> None:
    cancelled = []

    async def judge(response: str) -> float:
        if response == "r3":
            raise KeyError("r3")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(response)
            raise
        return 1.0

    with caller(judge) as scorer:
        with pytest.raises(RewardError, match="reward 'judge' raised KeyError on sample 3: 'r3'") as caught:
            score(scorer)
        assert isinstance(caught.value.__cause__, KeyError)
    assert sorted(cancelled) == [r for r in RESPONSES if r != "r3"]


def test_an_async_call_that_does_not_let_itself_be_cancelled_is_left_alone() -> None:
    async def stubborn(response: str) -> float:
        for _ in range(20 if response == "r1" else 0):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.2)
        return 1.0

    with caller(stubborn, timeout=0.2, on_error="abstain") as scorer:
        started = time.perf_counter()
        scores = score(scorer)
        assert time.perf_counter() - started < 2
    assert [i for i, value in enumerate(scores) if math.isnan(value)] == [1]


def test_a_call_that_blocks_the_loop_is_named_and_the_others_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    async def blocking(response: str) -> float:
        if response == "r3":
            time.sleep(6)
        await asyncio.sleep(0)
        return 1.0

    with caller(blocking, timeout=0.3, on_error="abstain") as scorer:
        started = time.perf_counter()
        scores = score(scorer)
        assert time.perf_counter() - started < 4
    assert [i for i, value in enumerate(scores) if math.isnan(value)] == [3]
    assert "it blocks the event loop" in caplog.text


# Processes


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


FACTOR = 2.0
_UNPICKLABLE = threading.Lock()


def of_this_module(response: str) -> float:
    """Uses a global as it is when called for, and tells whether its process knows this module."""
    return FACTOR + 100 * (__name__ in sys.modules)


def with_a_lock_of_its_module(response: str) -> float:
    with _UNPICKLABLE:
        return 3.0


def test_a_function_of_a_users_module_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5.0)
    with caller(of_this_module, workers=1) as scorer:
        assert score(scorer, 1) == [5.0]
    assert not cloudpickle.list_registry_pickle_by_value()


def test_a_function_that_uses_what_cannot_be_pickled_of_its_module_travels_by_name() -> None:
    with caller(with_a_lock_of_its_module, workers=1) as scorer:
        assert score(scorer, 1) == [3.0]


def test_a_function_that_cannot_travel_is_refused_by_name() -> None:
    lock = threading.Lock()

    def locked(response: str) -> float:
        with lock:
            return 1.0

    with caller(locked, timeout=1) as scorer, pytest.raises(RewardError, match=r"'locked' cannot be sent.*lock"):
        score(scorer)


def test_a_function_that_cannot_be_loaded_there_is_refused_by_name() -> None:
    class Odd:
        def __call__(self, response: str) -> float:
            return 1.0

        def __reduce__(self) -> Any:
            return _missing, ()

    with caller(Odd(), timeout=1) as scorer, pytest.raises(RewardError, match="'Odd' cannot be loaded .*not there"):
        score(scorer)


def _missing() -> Any:
    raise ImportError("not there")


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


def test_a_caller_travels_without_its_processes() -> None:
    with caller(lambda response: len(response), workers=1) as scorer:
        assert score(scorer, 2) == [2.0, 2.0]
        data = cloudpickle.dumps(scorer)
        with pickle.loads(data) as copy:
            assert copy._calls is None
            assert score(copy, 2) == [2.0, 2.0]
            assert pids(copy) != pids(scorer)


def test_a_caller_that_is_dropped_takes_its_processes_along() -> None:
    scorer = caller(len, workers=2)
    score(scorer)
    there = pids(scorer)
    assert there
    assert all(map(is_alive, there))
    del scorer
    assert not any(map(is_alive, there))
