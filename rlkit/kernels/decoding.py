"""Kernels of one decoding step: several small operations each, so that a token does not wait for their starts."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from rlkit.kernels import on_device_of

__all__ = ["BLOCK", "add_rms_norm", "block_masses"]

BLOCK = 1024
"""Logits of one block in `block_masses`."""


if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _add_rms_norm(x, y, weight, total, normed, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        place = row * WIDTH + column
        a = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        added = (a + b).to(total.dtype.element_ty)
        tl.store(total + place, added, mask=inside)
        wide = added.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + place, wide * scale * w, mask=inside)

    @triton.jit
    def _block_masses(logits, peaks, masses, scale, count, BLOCKS, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        block = tl.program_id(1)
        column = block * BLOCK + tl.arange(0, BLOCK)
        inside = column < count
        x = tl.load(logits + row * count + column, mask=inside, other=float("-inf")).to(tl.float32) * scale
        peak = tl.max(x, axis=0)
        mass = tl.where(peak == float("-inf"), 0.0, tl.sum(tl.exp(x - peak), axis=0))
        tl.store(peaks + row * BLOCKS + block, peak)
        tl.store(masses + row * BLOCKS + block, mass)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y (B, H) and its RMS norm times `weight` (H,); contiguous."""
    x, y = x.contiguous(), y.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    block: int = triton.next_power_of_2(width)
    with on_device_of(x):
        _add_rms_norm[(len(x),)](x, y, weight, total, normed, eps, width, block, num_warps=4 if block <= 2048 else 8)
    return total, normed


def block_masses(logits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Largest scaled logit of each block of `BLOCK`, and the sum of exponentials relative to it.

    Args:
        logits: (B, V), contiguous.
        scale: factor on the logits.

    Returns:
        peaks and masses (B, blocks) float32; a block of -inf alone has mass 0.
    """
    rows, count = logits.shape
    blocks: int = triton.cdiv(count, BLOCK)
    peaks = torch.empty(rows, blocks, device=logits.device, dtype=torch.float32)
    masses = torch.empty_like(peaks)
    with on_device_of(logits):
        _block_masses[(rows, blocks)](logits, peaks, masses, scale, count, blocks, BLOCK)
    return peaks, masses
