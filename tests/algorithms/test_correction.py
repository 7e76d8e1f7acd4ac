"""Rollout correction: goldens by hand, the gap metrics, refusals."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.correction import Correction, rollout_correction
from rlkit.errors import ConfigError, DataError

# Ratios p_old / p_rollout: 4 and 0.5 in the first response, 0.2 in the second, none in the third.
ROLLOUT = torch.tensor([[-2.0, -1.0], [-1.0, float("nan")], [0.0, 0.0]], dtype=torch.float64)
OLD = ROLLOUT + torch.tensor([[4.0, 0.5], [0.2, 1.0], [1.0, 1.0]], dtype=torch.float64).log()
MASK = torch.tensor([[1, 1], [1, 0], [0, 0]])


def _correct(**options: Any) -> Correction:
    return rollout_correction(OLD, ROLLOUT, MASK, **options)


def _close(given: Tensor, wanted: object) -> None:
    torch.testing.assert_close(given, torch.tensor(wanted, dtype=given.dtype), atol=1e-9, rtol=1e-9)


def _means(corrected: Correction) -> dict[str, float]:
    return {name: float(total) / int(count) for name, (total, count) in corrected.metrics.items()}


def test_without_options_nothing_is_corrected() -> None:
    corrected = _correct()
    assert torch.equal(corrected.weights, MASK.double())
    assert torch.equal(corrected.mask, MASK.bool())


def test_truncated_token_weights() -> None:
    corrected = _correct(weights="token", threshold=2.5)
    _close(corrected.weights, [[2.5, 0.5], [0.2, 0.0], [0.0, 0.0]])
    means = _means(corrected)
    assert means["weight_mean"] == pytest.approx(3.2 / 3)
    assert means["weight_square_mean"] == pytest.approx((6.25 + 0.25 + 0.04) / 3)
    assert (means["weight_high_fraction"], means["weight_low_fraction"]) == pytest.approx((1 / 3, 1 / 3))
    assert "weight_zeroed_fraction" not in means
    _close(_correct(weights="token", threshold=None).weights, [[4.0, 0.5], [0.2, 0.0], [0.0, 0.0]])


def test_icepop_zeroes_what_is_outside_the_band() -> None:
    corrected = _correct(weights="token", icepop=(0.4, 3.0))
    _close(corrected.weights, [[0.0, 0.5], [0.0, 0.0], [0.0, 0.0]])
    assert torch.equal(corrected.mask, MASK.bool())
    assert _means(corrected)["weight_zeroed_fraction"] == pytest.approx(2 / 3)


def test_sequence_weights_are_the_product_on_every_token() -> None:
    corrected = _correct(weights="sequence", threshold=1.5)
    _close(corrected.weights, [[1.5, 1.5], [0.2, 0.0], [0.0, 0.0]])
    assert _means(corrected)["weight_high_fraction"] == 0.5
    assert _means(corrected)["weight_low_fraction"] == 0.5


def test_normalised_weights_average_to_one() -> None:
    _close(_correct(weights="token", normalise=True).weights, [[2 / 0.9, 0.5 / 0.9], [0.2 / 0.9, 0.0], [0.0, 0.0]])
    _close(_correct(weights="sequence", normalise=True).weights, [[2 / 1.1, 2 / 1.1], [0.2 / 1.1, 0.0], [0.0, 0.0]])
    nothing = rollout_correction(OLD, ROLLOUT, torch.zeros_like(MASK), weights="token", normalise=True)
    assert nothing.weights.tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({"rejection": "token", "rejection_band": (0.4, 3.0)}, [[0, 1], [0, 0], [0, 0]]),
        ({"rejection": "token", "rejection_band": (0.1, 3.0)}, [[0, 1], [1, 0], [0, 0]]),
        ({"rejection": "sequence-sum", "rejection_band": (0.1, 1.9)}, [[0, 0], [1, 0], [0, 0]]),
        # The geometric mean of 4 and 0.5 is 1.414.
        ({"rejection": "sequence-mean", "rejection_band": (0.3, 1.5)}, [[1, 1], [0, 0], [0, 0]]),
        # k2: 0.961 and 0.240; 1.295. k3 of ratio r is r - 1 - log r: 1.614 and 0.193; 0.809.
        ({"rejection": "token", "rejection_kind": "k2", "rejection_limit": 0.5}, [[0, 1], [0, 0], [0, 0]]),
        ({"rejection": "sequence-max", "rejection_kind": "k2", "rejection_limit": 1.0}, [[1, 1], [0, 0], [0, 0]]),
        ({"rejection": "sequence-mean", "rejection_kind": "k3", "rejection_limit": 0.85}, [[0, 0], [1, 0], [0, 0]]),
        ({"rejection": "sequence-sum", "rejection_kind": "k3", "rejection_limit": 1.81}, [[1, 1], [1, 0], [0, 0]]),
    ],
)
def test_rejection_by_hand(options: dict[str, Any], mask: list[list[int]]) -> None:
    corrected = _correct(**options)
    assert corrected.mask.int().tolist() == mask
    assert torch.equal(corrected.weights, corrected.mask.double())
    means, lost = _means(corrected), MASK.bool() & ~corrected.mask
    assert means["rejected_token_fraction"] == pytest.approx(lost.sum().item() / 3)
    assert means["rejected_response_fraction"] == pytest.approx(lost.any(1).sum().item() / 2)


def test_the_divergence_that_is_compared_is_reported() -> None:
    tokens = _means(_correct(rejection="token", rejection_band=(0.1, 9.0)))
    assert tokens["rejection_divergence"] == pytest.approx(-math.log(4 * 0.5 * 0.2) / 3)
    rows = _means(_correct(rejection="sequence-max", rejection_kind="k3", rejection_limit=1.0))
    assert rows["rejection_divergence"] == pytest.approx((3 - math.log(4) + (-0.8 - math.log(0.2))) / 2)


def test_weights_and_rejection_combine() -> None:
    corrected = _correct(weights="token", threshold=2.0, rejection="token", rejection_band=(0.4, 9.0))
    _close(corrected.weights, [[2.0, 0.5], [0.0, 0.0], [0.0, 0.0]])


def test_the_gap_between_the_policies_is_measured() -> None:
    means = _means(_correct())
    assert means["rollout_kl"] == pytest.approx(-math.log(4 * 0.5 * 0.2) / 3)
    assert means["rollout_k3"] == pytest.approx((4.7 - 3 - math.log(0.4)) / 3)
    assert means["ratio_chi2"] == pytest.approx((16 + 0.25 + 0.04) / 3 - 1)
    assert means["sequence_ratio_chi2"] == pytest.approx((4 + 0.04) / 2 - 1)
    assert means["rollout_log_ppl"] == pytest.approx((1.5 + 1.0) / 2)
    assert means["old_log_ppl"] == pytest.approx((1.5 - math.log(2) / 2 + 1.0 - math.log(0.2)) / 2)
    assert means["log_ppl_gap"] == pytest.approx((math.log(2) / 2 - math.log(0.2)) / 2)
    assert means["rollout_ppl"] == pytest.approx((math.exp(1.5) + math.exp(1.0)) / 2)
    assert means["old_ppl"] == pytest.approx((math.exp(1.5) / math.sqrt(2) + math.exp(1.0) * 5) / 2)
    assert means["ppl_ratio"] == pytest.approx((1 / math.sqrt(2) + 5) / 2)


def test_equal_policies_need_no_correction() -> None:
    options = {"weights": "sequence", "rejection": "sequence-mean", "rejection_band": (0.999, 1.001), "normalise": True}
    corrected = rollout_correction(ROLLOUT, ROLLOUT, MASK, **options)
    assert torch.equal(corrected.weights, MASK.double())
    assert torch.equal(corrected.mask, MASK.bool())
    assert _means(corrected)["rollout_kl"] == _means(corrected)["ratio_chi2"] == 0.0


def test_a_gap_without_bounds_stays_finite_and_constant() -> None:
    wild = torch.full((2, 3), -500.0, requires_grad=True)
    corrected = rollout_correction(wild, torch.zeros(2, 3), torch.ones(2, 3), weights="sequence", threshold=None)
    assert corrected.weights.isfinite().all()
    assert not corrected.weights.requires_grad
    half = rollout_correction(wild.detach().bfloat16(), torch.zeros(2, 3), torch.ones(2, 3), weights="token")
    assert half.weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "row"}, "unknown weights 'row'; expected one of none, token, sequence"),
        ({"rejection": "row"}, "unknown rejection 'row'; expected one of none, token, sequence-sum"),
        ({"rejection": "token", "rejection_kind": "k4"}, "unknown rejection_kind 'k4'; expected one of k1, k2, k3"),
        ({"weights": "token", "threshold": 0.0}, "threshold must be above 0 or None"),
        ({"weights": "token", "icepop": (2.0, 0.5)}, "icepop must be two ratios (lo, hi) with 0 < lo < hi"),
        ({"rejection": "token", "rejection_band": (0.0, 2.0)}, "rejection_band must be two ratios"),
        ({"rejection_limit": 0.1}, "need a rejection level, given rejection='none'"),
        ({"rejection": "token"}, "rejection by 'k1' needs rejection_band"),
        ({"rejection": "sequence-max", "rejection_band": (0.5, 2.0)}, "a level other than 'sequence-max'"),
        ({"rejection": "token", "rejection_kind": "k3"}, "rejection by 'k3' needs rejection_limit in nats"),
        (
            {"rejection": "token", "rejection_kind": "k2", "rejection_limit": 0.1, "rejection_band": (0.5, 2.0)},
            "and no rejection_band",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _correct(**options)
    assert message in str(caught.value)


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"rollout_logprobs must have the shape of old_logprobs \(3, 2\), given \(2, 2\)"
    ):
        rollout_correction(OLD, ROLLOUT[:2], MASK)
    with pytest.raises(DataError, match="old_logprobs must have 2 dimension"):
        rollout_correction(OLD[0], ROLLOUT[0], MASK[0])
