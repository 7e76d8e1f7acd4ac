"""Mixing reward terms, and what is refused."""

import math
from typing import Any

import pytest
import torch

from rlkit.errors import CheckpointError, ConfigError
from rlkit.rewards import RewardWeights, mix


def test_mixing_by_hand() -> None:
    nan = math.nan
    terms = {"a": torch.tensor([1.0, nan, nan, 4.0]), "b": torch.tensor([10.0, 20.0, nan, -4.0])}
    rewards, valid = mix(terms, {"a": 0.5, "b": 2.0})
    assert rewards.tolist() == [20.5, 40.0, 0.0, -6.0]
    assert valid.tolist() == [True, True, False, True]
    assert terms["a"].isnan().sum() == 2
    assert rewards.dtype == torch.float32


@pytest.mark.parametrize("weights", [{}, {"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "c": 1.0}])
def test_mixing_needs_one_weight_per_term(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"one weight per reward term; terms \['a', 'b'\], weights"):
        mix({"a": torch.zeros(2), "b": torch.zeros(2)}, weights)


def test_batch_normalisation_by_hand() -> None:
    """1, 3 and 5 have mean 3 and standard deviation 2: -1, 0, 1 times the weight; the abstained sample adds 0."""
    nan = math.nan
    terms = {"a": torch.tensor([1.0, 3.0, nan, 5.0]), "b": torch.tensor([10.0, 10.0, 7.0, nan])}
    rewards, valid = mix(terms, {"a": 2.0, "b": 1.0}, normalization={"a": "batch"}, eps=0.0)
    assert rewards.tolist() == [8.0, 10.0, 7.0, 2.0]
    assert valid.all()
    flat, _ = mix(terms, {"a": 0.0, "b": 1.0}, normalization={"b": "batch"})
    assert flat[:2].tolist() == pytest.approx([0.57735, 0.57735], abs=1e-5)
    assert flat[2].item() == pytest.approx(-1.1547, abs=1e-4)


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_a_term_without_spread_or_with_one_sample_normalises_to_nothing(kind: Any) -> None:
    nan = math.nan
    groups = torch.zeros(3, dtype=torch.int64)
    for values in ([0.1, 0.1, 0.1], [nan, 7.0, nan]):
        rewards, valid = mix({"a": torch.tensor(values)}, {"a": 5.0}, normalization={"a": kind}, groups=groups)
        assert rewards.tolist() == [0.0, 0.0, 0.0]
        assert valid.tolist() == [not math.isnan(value) for value in values]


def test_group_normalisation_stays_within_the_group_wherever_its_rows_stand() -> None:
    """Group 7 holds 0 and 1 (std .7071): -.7071, .7071. Group 3 holds 100 and 104 (std 2.8284): the same."""
    term = torch.tensor([0.0, 100.0, 1.0, 104.0])
    rewards, _ = mix({"a": term}, {"a": 1.0}, normalization={"a": "group"}, groups=torch.tensor([7, 3, 7, 3]))
    assert rewards.tolist() == pytest.approx([-0.70711, -0.70711, 0.70711, 0.70711], abs=1e-4)


@pytest.mark.parametrize(
    ("normalization", "message"),
    [
        ({"a": "group"}, "needs to know which responses belong to one prompt: pass groups"),
        ({"a": "rank"}, "must be 'none', 'batch' or 'group', given 'rank'"),
        ({"b": "batch"}, r"normalization names \['b'\], which are no reward terms; terms are \['a'\]"),
    ],
)
def test_normalisation_that_cannot_be_done_is_refused(normalization: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mix({"a": torch.zeros(2)}, {"a": 1.0}, normalization=normalization)


def test_weights_of_another_trainer_are_refused() -> None:
    weights = RewardWeights({"tone": 1.0})
    for state, message in (
        ({"weights": {"mood": 1.0}}, r"saved reward weights are for terms \['mood'\], given terms \['tone'\]"),
        ({}, "under the key 'weights' alone"),
        ({"weights": {"tone": 2.0}, "more": 1}, "under the key 'weights' alone"),
    ):
        with pytest.raises(CheckpointError, match=message):
            weights.load_state_dict(state)
    assert weights.current == {"tone": 1.0}
    with pytest.raises(ConfigError, match="at least one term"):
        RewardWeights({})
