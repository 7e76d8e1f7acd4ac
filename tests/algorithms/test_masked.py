"""Masked statistics: goldens by hand, degenerate masks, half precision."""

import statistics

import pytest
import torch

from rlkit.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from rlkit.errors import DataError


def test_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 100.0], [6.0, -50.0, 7.0]]), torch.tensor([[1, 1, 0], [1, 0, 1]])
    kept = [1.0, 2.0, 6.0, 7.0]
    assert masked_sum(values, mask).item() == 16.0
    assert masked_sum(values, mask, dim=1).tolist() == [3.0, 13.0]
    assert masked_mean(values, mask, dim=0).tolist() == [3.5, 2.0, 7.0]
    assert masked_var(values, mask).item() == pytest.approx(statistics.variance(kept))
    assert masked_var(values, mask, unbiased=False).item() == pytest.approx(statistics.pvariance(kept))
    white = masked_whiten(values, mask)
    assert white[0, 2] == 0
    assert white[1, 1] == 0
    assert white[0, 0].item() == pytest.approx((1 - 4) / statistics.stdev(kept), abs=1e-6)


@pytest.mark.parametrize("count", [0, 1])
def test_masks_that_keep_too_little_give_finite_numbers(count: int) -> None:
    values, mask = torch.tensor([5.0, float("nan")]), torch.tensor([count == 1, False])
    assert masked_mean(values, mask).item() == 5.0 * count
    assert masked_var(values, mask).item() == 0.0
    assert masked_whiten(values, mask).tolist() == [0.0, 0.0]


def test_what_the_mask_leaves_out_reaches_no_gradient() -> None:
    values = torch.tensor([1.0, 3.0, float("nan"), float("inf")], requires_grad=True)
    masked_whiten(values, torch.tensor([True, True, False, False])).square().sum().backward()
    assert values.grad is not None
    assert values.grad.isfinite().all()
    assert values.grad[2:].tolist() == [0.0, 0.0]


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(DataError, match=r"mask must have the shape of values \(2, 3\), given \(2, 1\)"):
        masked_mean(torch.zeros(2, 3), torch.ones(2, 1))
