"""Kernels of one decoding step: several small operations each, so that a token does not wait for their starts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from rlkit.kernels import on_device_of

__all__ = ["add_rms_norm", "draw_tokens", "take_in"]

_BLOCK = 1024
"""Logits that are drawn from as one, and then looked at one by one."""


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

    @triton.jit
    def _draw(
        logits, peaks, masses, uniforms, tokens, logprobs, scale, count, BLOCKS,
        WAYS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        way = tl.arange(0, WAYS)
        there = way < BLOCKS
        block_peak = tl.load(peaks + row * BLOCKS + way, mask=there, other=float("-inf"))
        block_mass = tl.load(masses + row * BLOCKS + way, mask=there, other=0.0)
        peak = tl.max(block_peak, axis=0)
        cdf = tl.cumsum((block_mass * tl.exp(block_peak - peak)).to(tl.float64), axis=0)
        total = tl.max(cdf, axis=0)
        target = tl.load(uniforms + row) * total
        block = tl.minimum(tl.sum(((cdf <= target) & there).to(tl.int32), axis=0), BLOCKS - 1)
        before = tl.max(tl.where(way < block, cdf, 0.0), axis=0)
        lane = tl.arange(0, BLOCK)
        column = block * BLOCK + lane
        inside = column < count
        x = tl.load(logits + row * count + column, mask=inside, other=float("-inf")).to(tl.float32) * scale
        weight = tl.exp(x - peak)
        steps = tl.cumsum(weight.to(tl.float64), axis=0)
        offset = tl.sum((steps <= target - before).to(tl.int32), axis=0)
        # Rounding can leave the last step short of the target; the last token with any mass is meant then.
        offset = tl.minimum(offset, tl.max(tl.where(weight > 0.0, lane, 0), axis=0))
        chosen = tl.sum(tl.where(lane == offset, x, 0.0), axis=0)
        tl.store(tokens + row, (block * BLOCK + offset).to(tl.int64))
        tl.store(logprobs + row, chosen - peak - tl.log(total).to(tl.float32))

    @triton.jit
    def _take_in(
        tokens, logprobs, keeps, row, place, prompt_end, next_tokens, running, ids, kept_logprobs, mask, limit,
        count, spare, steps, ROWS: tl.constexpr,
    ):  # fmt: skip
        slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        there = slot < count
        runs = tl.load(running + slot, mask=there, other=0) != 0
        token = tl.load(tokens + slot, mask=there, other=0)
        here = tl.load(place + slot, mask=there, other=0)
        end = tl.load(prompt_end + slot, mask=there, other=0)
        time = here - end + 1
        target = tl.where(runs, tl.load(row + slot, mask=there, other=0), spare) * steps + time
        tl.store(ids + target, token, mask=there)
        tl.store(kept_logprobs + target, tl.load(logprobs + slot, mask=there, other=0.0), mask=there)
        tl.store(mask + target, tl.full([ROWS], 1, tl.int1), mask=there)
        goes_on = runs & (time + 1 < tl.load(limit)) & (tl.load(keeps + slot, mask=there, other=0) != 0)
        tl.store(place + slot, tl.where(goes_on, here + 1, end), mask=there)
        tl.store(next_tokens + slot, token, mask=there)
        tl.store(running + slot, goes_on, mask=there)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y (B, H) and its RMS norm times `weight` (H,); contiguous."""
    x, y = x.contiguous(), y.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    block: int = triton.next_power_of_2(width)
    with on_device_of(x):
        _add_rms_norm[(len(x),)](x, y, weight, total, normed, eps, width, block, num_warps=4 if block <= 2048 else 8)
    return total, normed


def draw_tokens(logits: Tensor, scale: float, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row by inverse CDF: first the block of logits that the number falls into, then the token in it.

    Args:
        logits: (B, V); -inf excludes a token.
        scale: factor on the logits, 1 / temperature.
        uniforms: (B,) float64 in [0, 1).

    Returns:
        tokens (B,) int64, and their log-probs (B,) float32.
    """
    logits = logits.contiguous()
    rows, count = logits.shape
    blocks: int = triton.cdiv(count, _BLOCK)
    peaks = logits.new_empty(rows, blocks, dtype=torch.float32)
    masses, logprobs = torch.empty_like(peaks), peaks.new_empty(rows)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    with on_device_of(logits):
        _block_masses[(rows, blocks)](logits, peaks, masses, scale, count, blocks, _BLOCK)
        _draw[(rows,)](
            logits, peaks, masses, uniforms, tokens, logprobs, scale, count, blocks,
            triton.next_power_of_2(blocks), _BLOCK,
        )  # fmt: skip
    return tokens, logprobs


def take_in(
    tokens: Tensor, logprobs: Tensor, keeps: Tensor, slots: Sequence[Tensor], written: Sequence[Tensor], limit: Tensor
) -> None:
    """Writes down the sampled tokens of rows that run, and makes them what the next step takes in.

    Args:
        tokens, logprobs, keeps: (b,) what was sampled, and whether it lets its row go on.
        slots: row, place, prompt_end, tokens, running (b,) of the slots; the last four change. A slot that does not
            run, or no more, stands at its `prompt_end`.
        written: ids, logprobs, mask (rows + 1, T), contiguous; the last row takes what slots write that do not run.
        limit: (1,) int64, tokens that a response may have, at least 2.
    """
    row, place, prompt_end, next_tokens, running = slots
    ids, kept_logprobs, mask = written
    count, spare, steps = len(row), len(ids) - 1, ids.shape[1]
    with on_device_of(tokens):
        _take_in[(triton.cdiv(count, 128),)](
            tokens, logprobs, keeps, row, place, prompt_end, next_tokens, running, ids, kept_logprobs, mask, limit,
            count, spare, steps, 128,
        )  # fmt: skip
