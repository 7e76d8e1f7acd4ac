"""Advantages against the other responses to a prompt: goldens by hand, the rule for degenerate groups, refusals."""

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
from rlkit.errors import ConfigError, DataError

NAN = float("nan")
ONE_GROUP = torch.zeros(4, dtype=torch.int64)
PAIRS = torch.tensor([0, 0, 1, 1])
HALF_ROOT = 1 / math.sqrt(2)


def _close(given: Tensor, wanted: object) -> None:
    torch.testing.assert_close(given, torch.tensor(wanted), atol=1e-4, rtol=0)


def test_abstained_rows_stay_out_of_every_method() -> None:
    rewards = torch.tensor([1.0, 0.0, NAN, 1.0])
    valid = ~rewards.isnan()
    _close(rloo_advantages(rewards, ONE_GROUP, valid), [0.5, -1.0, 0.0, 0.5])
    _close(gpg_advantages(rewards, ONE_GROUP, valid), [1 / 3, -2 / 3, 0.0, 1 / 3])
    _close(passk_advantages(torch.tensor([2.0, 0.5, NAN, 1.0]), ONE_GROUP, valid, scale_by_std=False), [1.0, 0, 0, 0])
    terms = {"only": rewards}
    whole = gdpo_advantages(terms, {"only": 1.0}, ONE_GROUP, torch.ones(4, 1), eps=1e-4, whiten=False)
    _close(whole[:, 0], [0.5773, -1.1545, 0.0, 0.5773])


def test_normalise_then_sum_keeps_combinations_apart() -> None:
    mask, weights = torch.ones(4, 1), {"r1": 1.0, "r2": 1.0}
    terms = {"r1": torch.tensor([0.0, 1.0, 0.0, 1.0]), "r2": torch.tensor([0.0, 0.0, 0.0, 1.0])}
    each = gdpo_advantages(terms, weights, PAIRS, mask, whiten=False)
    _close(each[:, 0], [-HALF_ROOT, HALF_ROOT, -2 * HALF_ROOT, 2 * HALF_ROOT])
    total = group_advantages(terms["r1"] + terms["r2"], PAIRS)
    _close(total, [-HALF_ROOT, HALF_ROOT, -HALF_ROOT, HALF_ROOT])
    half = gdpo_advantages(terms, {"r1": 1.0, "r2": 0.5}, PAIRS, mask, whiten=False)
    _close(half[2:, 0], [-1.0607, 1.0607])


def test_whitening_is_over_all_tokens_of_responses_with_a_score() -> None:
    terms = {"a": torch.tensor([0.0, 1.0, NAN, NAN]), "b": torch.tensor([NAN, NAN, 5.0, NAN])}
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
    advantages = gdpo_advantages(terms, {"a": 1.0, "b": 1.0}, PAIRS, mask)
    # Three tokens of -0.7071 and one of 0.7071: mean -0.35355, unbiased variance 0.5. The last row has no score.
    _close(advantages, [[-0.5, -0.5, -0.5], [1.5, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


def test_the_weights_must_fit_the_terms() -> None:
    terms = {"a": torch.zeros(4), "b": torch.zeros(4)}
    for weights in ({"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {}):
        with pytest.raises(ConfigError, match="one weight per reward term, given terms"):
            gdpo_advantages(terms, weights, PAIRS, torch.ones(4, 1))
    with pytest.raises(ConfigError, match=r"given terms \[\] and weights \[\]"):
        gdpo_advantages({}, {}, PAIRS, torch.ones(4, 1))


def test_gpg_scales_by_the_share_of_responses_that_give_a_gradient() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    _close(gpg_advantages(rewards, PAIRS), [1.0, -1.0, 0.0, 0.0])
    # Three rewards other than 0 out of four.
    _close(gpg_advantages(rewards, PAIRS, active="nonzero"), [2 / 3, -2 / 3, 0.0, 0.0])
    assert gpg_advantages(torch.ones(4), PAIRS).tolist() == [0.0] * 4


def test_gpg_does_not_see_a_shift_of_the_rewards() -> None:
    rewards = torch.tensor([0.3, 0.7, 0.0, 0.0])
    _close(gpg_advantages(rewards + 5, PAIRS) - gpg_advantages(rewards, PAIRS), [0.0] * 4)


def test_passk_pays_the_lead_of_the_best() -> None:
    rewards = torch.tensor([2.0, 0.5, 1.0, 1.0])
    _close(passk_advantages(rewards, ONE_GROUP, scale_by_std=False), [1.0, 0.0, 0.0, 0.0])
    spread = math.sqrt((0.875**2 + 0.625**2 + 2 * 0.125**2) / 3)
    _close(passk_advantages(rewards, ONE_GROUP), [1 / spread, 0.0, 0.0, 0.0])
    assert passk_advantages(torch.tensor([1.0, 1.0, 0.0, 0.0]), ONE_GROUP).tolist() == [0.0] * 4


def test_passk_is_the_gradient_of_the_expected_best_of_a_group() -> None:
    """Two arms of reward 1 and 0, groups of two: the estimate averages to the derivative of 1 - (1 - p)^2."""
    p, estimate = 0.3, 0.0
    for first, second in ((1, 1), (1, 0), (0, 1), (0, 0)):
        probability = (p if first else 1 - p) * (p if second else 1 - p)
        advantages = passk_advantages(
            torch.tensor([float(first), float(second)]), torch.zeros(2, dtype=torch.int64), scale_by_std=False
        )
        scores = [1 / p if arm else -1 / (1 - p) for arm in (first, second)]
        estimate += probability * sum(a * s for a, s in zip(advantages.tolist(), scores, strict=True))
    assert estimate == pytest.approx(2 * (1 - p))


def test_the_baseline_form_weighs_long_responses_by_their_tokens() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages = reinforce_plus_plus_baseline_advantages(torch.tensor([1.0, 0.0]), torch.tensor([3, 3]), mask)
    _close(advantages, [[0.5, 0.5, 0.5], [-1.5, 0.0, 0.0]])


def test_half_precision_rewards_are_counted_in_single() -> None:
    rewards = torch.ones(1000, dtype=torch.bfloat16)
    rewards[0] = 0
    advantages = rloo_advantages(rewards, torch.zeros(1000, dtype=torch.int64))
    assert advantages.dtype == torch.float32
    _close(advantages[:2], [-1.0, 1 / 999])


def test_bad_input_is_refused() -> None:
    rewards = torch.zeros(4)
    with pytest.raises(ConfigError, match="singleton must be 'zero' or 'raw', given 'mean'"):
        rloo_advantages(rewards, PAIRS, singleton="mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="active must be 'spread' or 'nonzero', given 'all'"):
        gpg_advantages(rewards, PAIRS, active="all")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"groups must have the shape of rewards \(4,\), given \(3,\)"):
        passk_advantages(rewards, PAIRS[:3])
    with pytest.raises(DataError, match=r"valid must have the shape of rewards \(4,\), given \(1,\)"):
        rloo_advantages(rewards, PAIRS, torch.ones(1, dtype=torch.bool))
    with pytest.raises(DataError, match=r"advantages must have the shape of one column of mask \(2,\), given \(4,\)"):
        reinforce_plus_plus_baseline_advantages(rewards, PAIRS, torch.ones(2, 3))
