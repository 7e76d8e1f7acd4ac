"""GAE, reward placement and group advantages: goldens by hand and against plain loops."""

import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.algorithms.advantages import gae, group_advantages, place_rewards
from rlkit.errors import ConfigError, DataError

VALUES = torch.tensor([[0.5, 0.6, 0.7]])
ONES = torch.ones(1, 3)


def _close(given: Tensor, wanted: object) -> None:
    torch.testing.assert_close(given, torch.tensor(wanted), atol=1e-4, rtol=0)


def test_r10_terminated_with_lambda_1() -> None:
    advantages, returns = gae(torch.tensor([[0.0, 0.0, 1.0]]), VALUES, ONES, 1.0, 1.0)
    _close(advantages, [[0.5, 0.4, 0.3]])
    _close(returns, [[1.0, 1.0, 1.0]])


def test_r10_terminated_with_lambda_095() -> None:
    advantages, returns = gae(torch.tensor([[0.0, 0.0, 1.0]]), VALUES, ONES, 1.0, 0.95)
    _close(advantages, [[0.46575, 0.3850, 0.3000]])
    _close(returns, [[0.96575, 0.9850, 1.0]])


def test_r10_truncated_with_and_without_bootstrap() -> None:
    rewards = torch.zeros(2, 3)
    advantages, _ = gae(rewards, VALUES.expand(2, 3), ONES.expand(2, 3), 1.0, 0.95, bootstrap=torch.tensor([0.8, 0.0]))
    _close(advantages, [[0.28525, 0.1950, 0.1000], [-0.43675, -0.5650, -0.7]])


def test_r10_padding_changes_nothing() -> None:
    pad = torch.nn.functional.pad
    rewards, bootstrap = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([0.8])
    plain = gae(rewards, VALUES, ONES, 0.9, 0.95, bootstrap)
    for left, right in ((0, 5), (5, 0), (2, 3)):
        wide = gae(
            pad(rewards, (left, right), value=7.0),
            pad(VALUES, (left, right), value=float("nan")),
            pad(ONES, (left, right)),
            0.9,
            0.95,
            bootstrap,
        )
        for narrow, padded in zip(plain, wide, strict=True):
            assert torch.equal(pad(narrow, (left, right)), padded)


def test_r10_the_reward_sits_on_the_last_sampled_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]])
    placed = place_rewards(torch.tensor([2.0, 3.0, 4.0, 5.0]), mask)
    assert placed.tolist() == [[0, 2, 0, 0], [0, 0, 0, 3], [0, 0, 0, 4], [0, 0, 0, 0]]


def test_the_kl_penalty_lowers_rewards_on_sampled_tokens_only() -> None:
    kl = torch.tensor([[0.5, -1.0, float("nan")]])
    placed = place_rewards(torch.tensor([1.0]), torch.tensor([[1, 1, 0]]), kl, 0.1)
    _close(placed, [[-0.05, 1.1, 0.0]])


def test_placing_on_no_columns_gives_no_columns() -> None:
    assert place_rewards(torch.tensor([1.0]), torch.zeros(1, 0)).shape == (1, 0)


def test_r04_reward_to_go_counts_real_tokens() -> None:
    rewards, mask = torch.tensor([[1.5, 1.0, 2.0, 2.0]]), torch.tensor([[1, 1, 0, 0]])
    advantages, returns = gae(rewards, torch.zeros(1, 4), mask, 1.0, 1.0)
    assert advantages.tolist() == returns.tolist() == [[2.5, 1.0, 0.0, 0.0]]


def test_gae_needs_matching_shapes() -> None:
    with pytest.raises(DataError, match="values must have 2 dimension"):
        gae(ONES, VALUES[0], ONES, 1.0, 1.0)
    with pytest.raises(DataError, match=r"values must have the shape of token_rewards \(1, 3\), given \(1, 2\)"):
        gae(ONES, VALUES[:, :2], ONES, 1.0, 1.0)
    with pytest.raises(DataError, match="bootstrap"):
        gae(ONES, VALUES, ONES, 1.0, 1.0, bootstrap=torch.zeros(2))


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


def test_r13_abstained_rows_stay_out_of_the_statistics() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, float("nan"), 1.0]), torch.zeros(4, dtype=torch.int64)
    valid = ~rewards.isnan()
    advantages = group_advantages(rewards, groups, eps=1e-4, valid=valid)
    _close(advantages, [0.5773, -1.1545, 0.0, 0.5773])
    assert torch.equal(advantages[valid], group_advantages(rewards[valid], groups[valid], eps=1e-4))
    assert group_advantages(rewards, groups, valid=torch.zeros(4, dtype=torch.bool)).tolist() == [0.0] * 4


def test_no_rows_give_no_rows() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def _loop(rewards: list[float], groups: list[int], scale: bool, singleton: str) -> list[float]:
    """The definition, one group at a time."""
    members: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        others = members[group]
        if len(others) == 1:
            result.append(0.0 if singleton == "zero" else reward / (1 + 1e-6 if scale else 1))
        elif len(set(others)) == 1:
            result.append(0.0)
        else:
            spread = statistics.stdev(others) + 1e-6 if scale else 1.0
            result.append((reward - statistics.fmean(others)) / spread)
    return result


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from([-1.5, 0.0, 0.25, 1.0, 2.0]), st.integers(-3, 3)), min_size=1, max_size=24),
    scale=st.booleans(),
    singleton=st.sampled_from(["zero", "raw"]),
    order=st.randoms(use_true_random=False),
)
def test_ragged_groups_agree_with_the_definition(
    rows: list[tuple[float, int]], scale: bool, singleton: str, order: object
) -> None:
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    inputs = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)
    advantages = group_advantages(*inputs, scale_by_std=scale, singleton=singleton)  # type: ignore[arg-type]
    wanted = torch.tensor(_loop(rewards, groups, scale, singleton), dtype=torch.float64)
    torch.testing.assert_close(advantages, wanted, atol=1e-9, rtol=1e-9)
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    moved = group_advantages(inputs[0][shuffled], inputs[1][shuffled], scale, singleton=singleton)  # type: ignore[arg-type]
    torch.testing.assert_close(moved, advantages[shuffled], atol=1e-12, rtol=1e-9)
