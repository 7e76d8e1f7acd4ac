"""R13: what a reward function may answer, what abstaining comes to, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlkit.algorithms.advantages import group_advantages
from rlkit.batch import RolloutBatch
from rlkit.controllers.reward import RewardController
from rlkit.errors import RewardError
from rlkit.rewards import mix
from rlkit.trainers.base import Trainer
from tests.trainers.toys import grpo, ppo

GROUP = torch.zeros(4, dtype=torch.int64)


def rewarded(answer: Any, **options: Any) -> torch.Tensor:
    """The term (4,) that a function with this answer writes for four samples."""

    def fixed(responses: list[str]) -> Any:
        return answer

    batch = RolloutBatch({"prompts": ["p"] * 4, "responses": list("abcd"), "columns": [{}] * 4})
    term: torch.Tensor = RewardController(fixed, **options).run(batch)["reward/fixed"]  # type: ignore[assignment]
    return term


def test_one_value_for_four_samples_is_an_error() -> None:
    with pytest.raises(RewardError, match="reward 'fixed' returned 1 rewards for 4 samples"):
        rewarded([1.0])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, "1", [1.0]])
def test_what_is_no_finite_number_is_an_error_that_names_function_and_sample(bad: Any) -> None:
    with pytest.raises(RewardError, match=r"reward 'fixed' returned .* for sample 2; expected a finite number"):
        rewarded([1.0, 0.0, bad, 1.0])


def test_numbers_of_every_kind_are_accepted() -> None:
    assert rewarded([True, 1, np.float32(0.5), torch.tensor(0.25)]).tolist() == [1.0, 1.0, 0.5, 0.25]


def test_abstention_stays_out_of_the_statistics_and_contributes_nothing() -> None:
    term = rewarded([1, 0, None, 1])
    assert term.isnan().tolist() == [False, False, True, False]
    wanted = torch.tensor([0.5773, -1.1545, 0.0, 0.5773])
    mixed, valid = mix({"fixed": term}, {"fixed": 1.0}, normalization={"fixed": "group"}, groups=GROUP, eps=1e-4)
    torch.testing.assert_close(mixed, wanted, atol=1e-4, rtol=0)
    assert valid.tolist() == [True, True, False, True]
    summed, valid = mix({"fixed": term}, {"fixed": 1.0})
    advantages = group_advantages(summed, GROUP, eps=1e-4, valid=valid)
    torch.testing.assert_close(advantages, wanted, atol=1e-4, rtol=0)


def test_samples_that_all_functions_abstain_from_are_marked_and_weigh_nothing() -> None:
    term = rewarded([None] * 4)
    for kind in ("none", "batch", "group"):
        mixed, valid = mix({"a": term}, {"a": 1.0}, normalization={"a": kind}, groups=GROUP)  # type: ignore[dict-item]
        assert mixed.tolist() == [0.0] * 4
        assert not valid.any()
        assert group_advantages(mixed, GROUP, valid=valid).tolist() == [0.0] * 4


def test_an_exception_follows_the_stated_policy() -> None:
    def strict(response: str) -> float:
        return {"a": 1.0, "b": 0.0, "d": 1.0}[response]

    batch = RolloutBatch({"prompts": ["p"] * 4, "responses": list("abcd"), "columns": [{}] * 4})
    with pytest.raises(RewardError, match="reward 'strict' raised KeyError on sample 2"):
        RewardController(strict).run(batch)
    reward = RewardController(strict, on_error="abstain")
    term: torch.Tensor = reward.run(batch)["reward/strict"]  # type: ignore[assignment]
    mixed, _ = mix({"strict": term}, {"strict": 1.0}, normalization={"strict": "group"}, groups=GROUP, eps=1e-4)
    torch.testing.assert_close(mixed, torch.tensor([0.5773, -1.1545, 0.0, 0.5773]), atol=1e-4, rtol=0)
    assert reward.take_failures() == {"timeouts": 0, "errors": 1}


# At the level of a trainer


def parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.actor.model.parameters()])


@pytest.mark.parametrize("build", [ppo, grpo])
def test_a_rollout_that_all_terms_abstain_on_is_not_learned_from(build: Any) -> None:
    def abstaining(responses: list[str]) -> list[None]:
        return [None] * len(responses)

    trainer = build(reward=abstaining)
    before = parameters(trainer).clone()
    result = trainer.step()
    assert torch.equal(parameters(trainer), before)
    assert result.metrics["reward/abstained_fraction"] == 1.0
    assert result.rollouts["reward"] == [None] * 16
    assert "reward/mean" not in result.metrics
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_a_group_with_one_abstention_in_a_trainer() -> None:
    """[1, 0, None, 1] gives 0.5774, -1.1547, 0, 0.5774 and no token to learn from; metrics are of the others."""

    def partly(responses: list[str]) -> list[float | None]:
        return [1.0, 0.0, None, 1.0]

    trainer = grpo(reward=partly, batch_size=4)
    trainer.follow_settings()
    batch, _ = trainer.gather()
    wanted = torch.tensor([0.5773, -1.1547, 0.0, 0.5773])
    torch.testing.assert_close(batch.advantages[:, 0], wanted, atol=1e-4, rtol=0)
    assert batch.learn_mask.any(1).tolist() == [True, True, False, True]
    metrics = trainer.step().metrics
    assert metrics["reward/mean"] == metrics["reward/partly"] == pytest.approx(2 / 3)
    assert metrics["reward/abstained_fraction"] == 0.25


def test_one_value_for_a_batch_stops_the_step_and_moves_nothing() -> None:
    trainer = grpo(reward=lambda responses: [1.0], batch_size=4)
    before = parameters(trainer).clone()
    with pytest.raises(RewardError, match="returned 1 rewards for 4 samples"):
        trainer.step()
    assert torch.equal(parameters(trainer), before)
    assert trainer.global_step == 0
