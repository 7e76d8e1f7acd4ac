"""Log-prob and entropy of rows of logits in one pass over them, and the gradient of both in another.

The formulas are those of `rlkit.algorithms.distributions`; the running maximum and sums of a softmax over blocks follow
Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from rlkit.kernels import on_device_of

__all__ = ["row_gradients", "row_scores"]

_BLOCK = 4096
_LEAST_LOGPROB = -1e4

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _scores(
        logits, ids, chosen, normaliser, spread, row_stride, width, scale, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        own = logits + row * row_stride
        peak = tl.full((), float("-inf"), tl.float32)
        mass = tl.full((), 0.0, tl.float32)  # of exp(x - peak)
        slope = tl.full((), 0.0, tl.float32)  # of exp(x - peak) * (x - peak)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(own + column, mask=column < width, other=float("-inf")).to(tl.float32) * scale
            higher = tl.maximum(peak, tl.max(x, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fall = tl.where(peak == float("-inf"), 0.0, peak - base)
            kept = tl.where(peak == float("-inf"), 0.0, tl.exp(fall))
            weight = tl.exp(x - base)
            slope = kept * (slope + mass * fall) + tl.sum(tl.where(weight > 0, weight * (x - base), 0.0), axis=0)
            mass = kept * mass + tl.sum(weight, axis=0)
            peak = higher
        log_mass = tl.log(mass)
        tl.store(normaliser + row, peak + log_mass)
        tl.store(spread + row, log_mass - slope / mass)
        if HAS_IDS:
            place = tl.load(ids + row)
            x = tl.load(own + place, mask=(place >= 0) & (place < width), other=float("nan")).to(tl.float32) * scale
            tl.store(chosen + row, x - peak - log_mass)

    @triton.jit
    def _gradients(
        logits, ids, normaliser, spread, chosen_grad, spread_grad, out, row_stride, width, scale, least,
        HAS_IDS: tl.constexpr, HAS_SPREAD: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32) * scale
        x -= tl.load(normaliser + row)
        pull = 0.0
        if HAS_IDS:
            pull = tl.load(chosen_grad + row) * scale
        slope = pull
        if HAS_SPREAD:
            slope += (tl.maximum(x, least) + tl.load(spread + row)) * (tl.load(spread_grad + row) * scale)
        part = -tl.exp(x) * slope
        if HAS_IDS:
            part += tl.where(column == tl.load(ids + row), pull, 0.0)
        tl.store(out + row * width + column, part, mask=inside)


def row_scores(logits: Tensor, ids: Tensor | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of one token a row, normaliser and entropy of softmax(logits / temperature).

    Args:
        logits: (N, V) float32 or half precision, each row contiguous.
        ids: (N,) int64; None gives log-probs of 0.
        temperature: above 0.

    Returns:
        log-probs, log of the sum of exponentials, and entropies in nats: (N,) float32 each.
    """
    rows, width = logits.shape
    chosen = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    normaliser, spread = torch.empty_like(chosen), torch.empty_like(chosen)
    if rows:
        given = logits if ids is None else ids.contiguous()
        scale = 1.0 / temperature
        with on_device_of(logits):
            _scores[(rows,)](
                logits, given, chosen, normaliser, spread, logits.stride(0), width, scale, ids is not None, _BLOCK,
                num_warps=8,
            )  # fmt: skip
    return chosen, normaliser, spread


def row_gradients(
    logits: Tensor,
    ids: Tensor | None,
    normaliser: Tensor,
    spread: Tensor,
    grads: tuple[Tensor | None, Tensor | None],
    temperature: float,
) -> Tensor:
    """Gradient (N, V), in the dtype of the logits, from those of the log-probs and of the entropies (N,), or None."""
    rows, width = logits.shape
    out = logits.new_empty(logits.shape)
    if rows:
        of_chosen, of_spread = (grad if grad is None else grad.contiguous() for grad in grads)
        pulls = ids is not None and of_chosen is not None
        blank = normaliser  # stands where nothing is read
        with on_device_of(logits):
            _gradients[(rows, triton.cdiv(width, _BLOCK))](
                logits, blank if ids is None else ids.contiguous(), normaliser, spread,
                blank if of_chosen is None else of_chosen, blank if of_spread is None else of_spread, out,
                logits.stride(0), width, 1.0 / temperature, _LEAST_LOGPROB, pulls, of_spread is not None, _BLOCK,
                num_warps=8,
            )  # fmt: skip
    return out
