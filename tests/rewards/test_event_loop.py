"""Async reward functions: awaited side by side, with a limit, on a loop that is theirs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
import time

import pytest

from rlkit.errors import RewardError
from tests.rewards.calling import RESPONSES, caller, score


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


def test_a_caller_that_is_dropped_ends_its_loop() -> None:
    loops = []

    async def judge(response: str) -> float:
        loops.append(asyncio.get_running_loop())
        return 1.0

    score(caller(judge))
    gc.collect()
    for _ in range(100):
        if loops[0].is_closed():
            break
        time.sleep(0.02)
    assert loops[0].is_closed()
