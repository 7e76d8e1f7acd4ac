"""GAE, reward placement and group advantages: goldens by hand and against plain loops."""

import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.algorithms.advantages import gae, group_advantages, place_rewards
from rlkit.errors import DataError

VALUES = torch.tensor([[0.5, 0.6, 0.7]])
ONES = torch.ones(1, 3)


def _close(given: Tensor, wanted: object) -> None:
    torch.testing.assert_close(given, torch.tensor(wanted), atol=1e-4, rtol=0)


def test_the_kl_penalty_lowers_rewards_on_sampled_tokens_only() -> None:
    kl = torch.tensor([[0.5, -1.0, float("nan")]])
    placed = place_rewards(torch.tensor([1.0]), torch.tensor([[1, 1, 0]]), kl, 0.1)
    _close(placed, [[-0.05, 1.1, 0.0]])


def test_placing_on_no_columns_gives_no_columns() -> None:
    assert place_rewards(torch.tensor([1.0]), torch.zeros(1, 0)).shape == (1, 0)


def test_gae_needs_matching_shapes() -> None:
    with pytest.raises(DataError, match="values must have 2 dimension"):
        gae(ONES, VALUES[0], ONES, 1.0, 1.0)
    with pytest.raises(DataError, match=r"values must have the shape of token_rewards \(1, 3\), given \(1, 2\)"):
        gae(ONES, VALUES[:, :2], ONES, 1.0, 1.0)
    with pytest.raises(DataError, match="bootstrap"):
        gae(ONES, VALUES, ONES, 1.0, 1.0, bootstrap=torch.zeros(2))


def test_abstained_rows_stay_out_of_the_statistics() -> None:
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
