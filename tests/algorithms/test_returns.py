"""Advantages from the rewards that follow a token, and the penalty on long responses: goldens by hand."""

import math

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.advantages import overlong_penalty, reinforce_plus_plus_advantages, remax_advantages
from rlkit.errors import ConfigError, DataError

NAN = float("nan")


def _close(given: Tensor, wanted: object) -> None:
    torch.testing.assert_close(given, torch.tensor(wanted), atol=1e-4, rtol=0)


def test_reinforce_plus_plus_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0, NAN], [NAN, -1.0, 5.0]])
    advantages, returns = reinforce_plus_plus_advantages(rewards, torch.tensor([[1, 1, 0], [0, 1, 0]]), 0.5)
    _close(returns, [[2.0, 2.0, 0.0], [0.0, -1.0, 0.0]])
    # Mean 1, unbiased variance 3.
    _close(advantages, [[1 / math.sqrt(3), 1 / math.sqrt(3), 0.0], [0.0, -2 / math.sqrt(3), 0.0]])


def test_reinforce_plus_plus_steps_over_what_the_policy_did_not_sample() -> None:
    _, returns = reinforce_plus_plus_advantages(torch.tensor([[1.0, 9.0, 4.0]]), torch.tensor([[1, 0, 1]]), 0.5)
    _close(returns, [[3.0, 0.0, 4.0]])


def test_reinforce_plus_plus_of_a_single_token_is_zero() -> None:
    advantages, returns = reinforce_plus_plus_advantages(torch.tensor([[3.0]]), torch.ones(1, 1), 1.0)
    assert (advantages.item(), returns.item()) == (0.0, 3.0)


def test_remax_by_hand() -> None:
    rewards, mask = torch.tensor([[-0.1, 0.0, 1.0], [0.5, NAN, NAN]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages, returns = remax_advantages(rewards, torch.tensor([0.4, 2.0]), mask)
    _close(returns, [[0.9, 1.0, 1.0], [0.5, 0.0, 0.0]])
    _close(advantages, [[0.5, 0.6, 0.6], [-1.5, 0.0, 0.0]])
    with pytest.raises(DataError, match=r"baselines must have the shape of one column of token_rewards \(2,\)"):
        remax_advantages(rewards, torch.tensor([0.4]), mask)


def test_the_overlong_penalty_by_hand() -> None:
    lengths = torch.tensor([0, 80, 81, 90, 100, 101, 10_000])
    penalty = overlong_penalty(lengths, max_length=100, buffer=20)
    assert penalty.dtype == torch.float32
    _close(penalty, [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0])
    assert overlong_penalty(torch.tensor([99, 100]), max_length=100, buffer=1).tolist() == [0.0, -1.0]


def test_the_overlong_buffer_must_fit_the_limit() -> None:
    for buffer in (0, 101, -3):
        with pytest.raises(ConfigError, match=r"within 1..max_length \(100\), given"):
            overlong_penalty(torch.tensor([1]), max_length=100, buffer=buffer)
    with pytest.raises(DataError, match="lengths must have 1 dimension"):
        overlong_penalty(torch.ones(2, 2), max_length=100, buffer=5)
