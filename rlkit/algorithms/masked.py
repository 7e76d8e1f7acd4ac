"""Sums, means and variances over the elements that a mask keeps."""

import torch
from torch import Tensor

from rlkit.algorithms.shapes import require_same_shape

__all__ = ["EPSILON", "masked_mean", "masked_sum", "masked_var", "masked_whiten"]

EPSILON = 1e-8
"""Added to counts and variances before dividing; below the resolution of float32 for any real count."""


def _keep(values: Tensor, mask: Tensor) -> Tensor:
    """Values with zeros outside the mask; half precision becomes float32, in which sums and counts are exact enough."""
    values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def _count(mask: Tensor, dim: int | None, dtype: torch.dtype) -> Tensor:
    return (mask.bool().sum() if dim is None else mask.bool().sum(dim)).to(dtype)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the elements where `mask` is true.

    Args:
        values: any shape.
        mask: same shape, bool or 0/1.
        dim: dimension to sum over; all of them when left out.
    """
    require_same_shape(values=values, mask=mask)
    kept = _keep(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the elements where `mask` is true: sum / (count + 1e-8), so 0 where the mask keeps nothing.

    Args as for `masked_sum`.
    """
    total = masked_sum(values, mask, dim)
    return total / (_count(mask, dim, total.dtype) + EPSILON)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance (0-d) over the elements where `mask` is true; 0 when the mask keeps fewer than two.

    Args:
        values: any shape.
        mask: same shape, bool or 0/1.
        unbiased: multiply by n / (n - 1) (Bessel's correction).
    """
    mean = masked_mean(values, mask)
    centred = _keep(values, mask) - mean
    variance = masked_mean(centred.square(), mask)
    count = _count(mask, None, variance.dtype)
    if unbiased:
        variance = variance * count / (count - 1).clamp_min(1)
    return torch.where(count > 1, variance, torch.zeros_like(variance))


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) on the elements where `mask` is true, 0 elsewhere.

    Values that differ by no more than their rounding have no spread: their centred values are exact zeros, which
    the division by sqrt(1e-8) would otherwise turn into numbers that matter.

    Args:
        values: any shape.
        mask: same shape, bool or 0/1.
        shift_mean: false keeps the mean where it was and only scales the spread.
    """
    require_same_shape(values=values, mask=mask)
    mean = masked_mean(values, mask)
    kept = _keep(values, mask)
    centred = torch.where(_has_spread(kept, mask), kept - mean, torch.zeros_like(kept))
    white = centred * torch.rsqrt(masked_var(values, mask) + EPSILON)
    return _keep(white if shift_mean else white + mean, mask)


def _has_spread(kept: Tensor, mask: Tensor) -> Tensor:
    """Whether (0-d bool) the values inside the mask differ by more than eight roundings of the largest."""
    if kept.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=kept.device)
    inside = mask.bool()
    highest = kept.masked_fill(~inside, -torch.inf).max()
    lowest = kept.masked_fill(~inside, torch.inf).min()
    return ~(highest - lowest <= 8 * torch.finfo(kept.dtype).eps * kept.abs().max())  # a NaN must not hide
