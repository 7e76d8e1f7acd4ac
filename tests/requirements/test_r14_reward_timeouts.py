"""R14: an endless scoring call costs one sample and a second, and async rewards work where a loop runs already."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any

import pytest
import torch

from rlkit.batch import RolloutBatch
from rlkit.controllers.reward import RewardController
from rlkit.errors import RewardError
from tests.trainers.toys import grpo


def batch() -> RolloutBatch:
    return RolloutBatch(
        {"prompts": [f"p{i}" for i in range(8)], "responses": [f"r{i}" for i in range(8)], "columns": [{}] * 8}
    )


def sleeper(response: str) -> float:
    if response == "r3":
        time.sleep(60)
    return float(response[1:])


async def async_sleeper(response: str) -> float:
    if response == "r3":
        await asyncio.sleep(60)
    return float(response[1:])


@pytest.mark.parametrize(
    ("fn", "options"), [(sleeper, {}), (sleeper, {"workers": 2}), (async_sleeper, {}), (async_sleeper, {"workers": 2})]
)
def test_a_call_of_60_s_under_a_limit_of_1_s(fn: Any, options: dict[str, int], caplog: Any) -> None:
    reward = RewardController(fn, timeout=1.0, on_error="abstain", **options)
    started = time.perf_counter()
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        term: torch.Tensor = reward.run(batch())[f"reward/{fn.__name__}"]  # type: ignore[assignment]
    assert time.perf_counter() - started < 5
    assert [i for i, value in enumerate(term.tolist()) if math.isnan(value)] == [3]
    assert [value for value in term.tolist() if not math.isnan(value)] == [0, 1, 2, 4, 5, 6, 7]
    (record,) = caplog.records
    name = fn.__name__
    assert record.getMessage() == (
        f"reward term '{name}' abstains from sample 3 (prompt 'p3'): reward '{name}' took longer than its limit of 1 s "
        "on sample 3"
    )
    assert 1.0 <= reward.take_latency() < 5
    assert reward.take_failures() == {"timeouts": 1, "errors": 0}
    reward.close()


def test_by_default_the_step_ends_with_an_error_that_names_the_sample() -> None:
    reward = RewardController(sleeper, timeout=0.5)
    with pytest.raises(RewardError, match=r"reward 'sleeper' took longer than its limit of 0\.5 s on sample 3"):
        reward.run(batch())
    reward.close()


@pytest.mark.parametrize("fn", [sleeper, async_sleeper])
def test_rewards_work_inside_a_loop_that_runs(fn: Any) -> None:
    async def main() -> list[float]:
        reward = RewardController(fn, timeout=1.0, on_error="abstain")
        await asyncio.sleep(0)
        term: torch.Tensor = reward.run(batch())[f"reward/{fn.__name__}"]  # type: ignore[assignment]
        reward.close()
        return term.tolist()  # type: ignore[no-any-return]

    assert [value for value in asyncio.run(main()) if not math.isnan(value)] == [0, 1, 2, 4, 5, 6, 7]


def test_rewards_defined_in_a_notebook_cell_work_there() -> None:
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cell = """
import asyncio, time
from rlkit import RewardController, RolloutBatch

factor = 2

def plain(response):
    time.sleep(60 if response == "r1" else 0)
    return factor * len(response)

async def judge(response):
    await asyncio.sleep(60 if response == "r1" else 0)
    return factor * len(response)

batch = RolloutBatch({"prompts": ["p"] * 3, "responses": ["r0", "r1", "r22"], "columns": [{}] * 3})
assert asyncio.get_running_loop().is_running()
for fn in (plain, judge):
    reward = RewardController(fn, timeout=1.0, on_error="abstain")
    print(fn.__name__, reward.run(batch)[reward.field].tolist())
    reward.close()
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    client.NotebookClient(notebook, timeout=90, kernel_name="python3").execute()
    text = "".join(o.get("text", "") for o in notebook.cells[0].outputs if o.get("name") == "stdout")
    assert text == "plain [4.0, nan, 6.0]\njudge [4.0, nan, 6.0]\n"


def test_a_step_goes_on_without_the_sample_that_took_too_long() -> None:
    """Sample 3 of 8 would take 60 s: the step takes under 5 s, keeps seven scores and says which is gone."""
    calls = iter(range(8))

    async def slow(response: str) -> float:
        mine = next(calls)
        await asyncio.sleep(60 if mine == 3 else 0)
        return float(mine)

    reward = RewardController(slow, timeout=1.0, on_error="abstain")
    trainer = grpo(reward=reward, batch_size=8, group_size=8)
    started = time.perf_counter()
    result = trainer.step()
    assert time.perf_counter() - started < 5
    scores = result.rollouts["reward/slow"]
    assert scores.count(None) == 1
    assert sorted(score for score in scores if score is not None) == [0, 1, 2, 4, 5, 6, 7]
    assert result.rollouts["reward"][scores.index(None)] is None
    assert result.metrics["reward/timeouts"] == 1
    assert result.metrics["reward/abstained_fraction"] == 1 / 8
    assert math.isfinite(result.metrics["train/grad_norm"])
    assert trainer.global_step == 1
    reward.close()
