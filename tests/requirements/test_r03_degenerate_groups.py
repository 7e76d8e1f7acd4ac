"""R03: one rule for groups of one and groups without spread: always finite, the same in every estimator."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.advantages import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    passk_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from rlkit.errors import ConfigError
from tests.trainers.toys import grpo

ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def _close(given: Tensor, wanted: object) -> None:
    torch.testing.assert_close(given, torch.tensor(wanted), atol=1e-4, rtol=0)


def test_r03_equal_rewards_give_zeros() -> None:
    for reward in (1.0, 0.1, -1e-3, 1e6):
        assert group_advantages(torch.full((6,), reward), torch.tensor([0, 0, 0, 1, 1, 1])).tolist() == [0.0] * 6


def test_r03_two_against_two() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.int64)
    _close(group_advantages(rewards, groups, eps=1e-4), [-0.8659, 0.8659, -0.8659, 0.8659])
    _close(group_advantages(rewards, groups, scale_by_std=False), [-0.5, 0.5, -0.5, 0.5])


def test_r03_a_group_of_one_is_finite() -> None:
    rewards, groups = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([7, -2, -2])
    zero, raw = group_advantages(rewards, groups), group_advantages(rewards, groups, singleton="raw")
    assert zero[0] == 0
    assert raw[0].item() == pytest.approx(3.0, abs=1e-5)
    assert torch.equal(zero[1:], raw[1:])
    assert group_advantages(rewards, groups, scale_by_std=False, singleton="raw")[0] == 3.0
    with pytest.raises(ConfigError, match="'zero' or 'raw'"):
        group_advantages(rewards, groups, singleton="nan")  # type: ignore[arg-type]


def test_r03_rloo_by_hand() -> None:
    _close(rloo_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), ONE_GROUP), [1.0, -1 / 3, -1 / 3, -1 / 3])


def test_r03_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards, groups = torch.tensor([3.0, 1.0, 5.0, 2.0, 8.0]), torch.tensor([1, 0, 1, 0, 1])
    _close(rloo_advantages(rewards, groups), [3 - 6.5, 1 - 2.0, 5 - 5.5, 2 - 1.0, 8 - 4.0])


def test_r03_one_rule_for_a_response_without_siblings() -> None:
    rewards, groups = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([7, 4, 4])
    mask = torch.ones(3, 2)
    terms, weights = {"all": rewards}, {"all": 1.0}
    by_zero = (
        group_advantages(rewards, groups),
        group_advantages(rewards, groups, scale_by_std=False),
        rloo_advantages(rewards, groups),
        gpg_advantages(rewards, groups),
        passk_advantages(rewards, groups),
        gdpo_advantages(terms, weights, groups, mask, whiten=False)[:, 0],
    )
    for advantages in by_zero:
        assert advantages[0] == 0.0
        assert advantages[2] > 0
    by_raw = (
        group_advantages(rewards, groups, singleton="raw"),
        group_advantages(rewards, groups, scale_by_std=False, singleton="raw"),
        rloo_advantages(rewards, groups, singleton="raw"),
        gpg_advantages(rewards, groups, singleton="raw"),
        gdpo_advantages(terms, weights, groups, mask, whiten=False, singleton="raw")[:, 0],
    )
    for advantages, without in zip(by_raw, (*by_zero[:4], by_zero[5]), strict=True):
        assert advantages[0].item() == pytest.approx(3.0, abs=1e-5)
        assert advantages[1].sign() == without[1].sign() == -1
    # Centred -0.5 and 0.5, the lone response 0 or 3, whitened over two tokens each.
    zero = reinforce_plus_plus_baseline_advantages(rewards, groups, mask)
    _close(zero[:, 0], [0.0, -0.5 / math.sqrt(0.2), 0.5 / math.sqrt(0.2)])
    raw = reinforce_plus_plus_baseline_advantages(rewards, groups, mask, singleton="raw")
    spread = math.sqrt(2 * (4 + 2.25 + 0.25) / 5)
    _close(raw[:, 0], [2 / spread, -1.5 / spread, -0.5 / spread])


def test_r03_ragged_groups_as_a_loop_over_them() -> None:
    """Groups of 3, 1, 2 and 4 rows, as filtering leaves them, in no order."""
    groups = torch.tensor([5, 1, 5, 8, 8, 5, 9, 9, 9, 9])
    rewards = torch.tensor([1.0, 4.0, 0.0, 2.0, 2.0, 5.0, 0.0, 1.0, 1.0, 0.0])
    by_std, left_out = torch.zeros(10), torch.zeros(10)
    for group in groups.unique().tolist():
        rows = (groups == group).nonzero().flatten().tolist()
        for row in rows if len(rows) > 1 else []:
            own = rewards[rows]
            others = [rewards[other].item() for other in rows if other != row]
            by_std[row] = (rewards[row] - own.mean()) / (own.std() + 1e-6)
            left_out[row] = rewards[row] - sum(others) / len(others)
    _close(group_advantages(rewards, groups), by_std.tolist())
    _close(rloo_advantages(rewards, groups), left_out.tolist())


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++-baseline", "gpg", "pass@k"])
def test_r03_a_trainer_refuses_groups_of_one_that_could_never_learn(estimator: str) -> None:
    with pytest.raises(ConfigError, match="group of one always has advantage 0 and never learns"):
        grpo(group_size=1, advantage_estimator=estimator)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++", "reinforce++-baseline", "gpg", "pass@k"])
def test_r03_a_step_without_spread_is_finite_and_moves_nothing(estimator: str) -> None:
    trainer = grpo(reward=lambda response: 1.0, advantage_estimator=estimator)
    before = [parameter.detach().clone() for parameter in trainer.actor.model.parameters()]
    metrics = trainer.step().metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rollout/groups_without_spread_fraction"] == 1.0
    assert metrics["train/grad_norm"] == 0.0
    assert all(map(torch.equal, before, trainer.actor.model.parameters()))
