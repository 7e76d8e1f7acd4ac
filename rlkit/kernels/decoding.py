"""Kernels of one decoding step: several small operations each, so that a token does not wait for their starts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rlkit.kernels import on_device_of

__all__ = ["BLOCK", "add_rms_norm", "block_masses", "rotate_and_store"]

BLOCK = 1024
"""Logits of one block in `block_masses`."""


if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _rotate_and_store(
        query, key, value, cos, sin, place, rotated, keys, values,
        query_stride, key_stride, value_stride, row_stride, head_stride, column_stride,
        HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        half: tl.constexpr = WIDTH // 2
        low = tl.arange(0, BLOCK)
        inside = low < half
        target = row * row_stride + tl.load(place + row) * column_stride
        if head >= HEADS + KEY_HEADS:
            own = head - HEADS - KEY_HEADS
            source = value + row * value_stride + own * WIDTH
            kept = values + target + own * head_stride
            tl.store(kept + low, tl.load(source + low, mask=inside), mask=inside)
            tl.store(kept + half + low, tl.load(source + half + low, mask=inside), mask=inside)
        else:
            is_query = head < HEADS
            own = head - HEADS
            source = query + row * query_stride + head * WIDTH
            aim = rotated + (row * HEADS + head) * WIDTH
            if not is_query:
                source = key + row * key_stride + own * WIDTH
                aim = keys + target + own * head_stride
            first = tl.load(source + low, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(source + half + low, mask=inside, other=0.0).to(tl.float32)
            angle = row * WIDTH + low
            cos_first = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
            cos_second = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)
            sin_first = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
            sin_second = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)
            tl.store(aim + low, first * cos_first + second * sin_first, mask=inside)
            tl.store(aim + half + low, second * cos_second + first * sin_second, mask=inside)

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


def rotate_and_store(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, place: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotates queries and keys by their position, and puts keys and values into a column of the cache.

    Args:
        query: (B, heads * D), each row contiguous.
        key, value: (B, key heads * D), each row contiguous.
        cos, sin: (B, 1, D), `sin` with the sign of the rotated half: negative in the first half.
        place: (B,) int64, the column of each row.
        keys, values: (B, key heads, W, D) with equal strides, the last one 1.

    Returns:
        (B, heads, D) rotated queries.
    """
    rows, key_heads, width = len(query), keys.shape[1], keys.shape[-1]
    heads = query.shape[1] // width
    rotated = query.new_empty(query.shape)
    block: int = triton.next_power_of_2(width // 2)
    strides: Any = (*(x.stride(0) for x in (query, key, value)), *keys.stride()[:3])
    with on_device_of(query):
        _rotate_and_store[(rows, heads + 2 * key_heads)](
            query, key, value, cos.contiguous(), sin.contiguous(), place, rotated, keys, values, *strides,
            heads, key_heads, width, block, num_warps=1,
        )  # fmt: skip
    return rotated.view(rows, heads, width)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y (B, H) and its RMS norm times `weight` (H,); contiguous."""
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
