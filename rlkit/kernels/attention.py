"""Attention of a decoding step: one new token a row, over a cache where rows of one prompt read that from one slot."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rlkit.kernels import on_device_of

__all__ = ["attend_new_token"]

_BUSY = 264
"""Programs that keep a GPU busy: two for each multiprocessor of a large one."""
_TILES = 1 << 16
"""Bytes of keys and values that a program may have on their way: GPUs with little shared memory hold 99 KiB."""
_LEAST = 512
"""Columns that one program reads at least, where several share a row."""


if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _turned(x, offset, angle, cos, sin, inside, HALF: tl.constexpr, WIDTH: tl.constexpr, lane):
        """Values at `offset` + lane, rotated; the other half of a head has the partner of each."""
        partner = tl.where(lane < HALF, lane + HALF, lane - HALF)
        own = tl.load(x + offset + lane, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(x + offset + partner, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + angle + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        s = tl.load(sin + angle + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        return own * c + other * s

    @triton.jit
    def _over_columns(
        query, peak, mass, total, keys, values, low, high, column_stride, scale, lane,
        WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Takes columns from `low` up to `high` into a softmax that runs: its peak, mass and weighted sum of values."""
        for start in range(low, high, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            there = column < high
            place = column * column_stride
            across = lane < WIDTH
            k = tl.load(keys + place[None, :] + lane[:, None], mask=there[None, :] & across[:, None], other=0.0)
            scores = tl.dot(query, k.to(query.dtype), input_precision="ieee")
            scores = tl.where(there[None, :], scores * scale, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, axis=1))
            shrink = tl.exp2(peak - higher)
            shares = tl.exp2(scores - higher[:, None])
            mass = mass * shrink + tl.sum(shares, axis=1)
            v = tl.load(values + place[:, None] + lane[None, :], mask=there[:, None] & across[None, :], other=0.0)
            exact = query.dtype
            total = total * shrink[:, None] + tl.dot(shares.to(exact), v.to(exact), input_precision="ieee")
            peak = higher
        return peak, mass, total

    @triton.jit
    def _attend(
        query, key, value, cos, sin, keys, values, begin, prompt_end, source, place, out, peaks, masses,
        query_stride, key_stride, value_stride, row_stride, head_stride, column_stride, scale,
        KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, WIDE: tl.constexpr,
        COLUMNS: tl.constexpr, SPLITS: tl.constexpr, PRECISE: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0) // KEY_HEADS).to(tl.int64)
        head = tl.program_id(0) % KEY_HEADS
        split = tl.program_id(1)
        lane = tl.arange(0, WIDE)
        across = lane < WIDTH
        member = tl.arange(0, QUERIES)
        half: tl.constexpr = WIDTH // 2
        here = tl.load(place + row).to(tl.int32)
        first = tl.load(begin + row).to(tl.int32)
        own = tl.load(prompt_end + row).to(tl.int32)
        angle = (here - first) * WIDTH
        asked = query + row * query_stride + (head * GROUP + member[:, None]) * WIDTH
        in_group = (member[:, None] < GROUP) & across[None, :]
        q = _turned(asked, 0, angle, cos, sin, in_group, half, WIDTH, lane[None, :])
        q = q.to(query.dtype.element_ty)
        if PRECISE:
            q = q.to(tl.float32)
        of_head = head * head_stride
        if split == 0:
            k = _turned(key + row * key_stride, head * WIDTH, angle, cos, sin, across, half, WIDTH, lane)
            k = k.to(keys.dtype.element_ty)
            v = tl.load(value + row * value_stride + head * WIDTH + lane, mask=across, other=0.0)
            target = row * row_stride + of_head + here * column_stride + lane
            tl.store(keys + target, k, mask=across)
            tl.store(values + target, v, mask=across)
            peak = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale
            mass = tl.full([QUERIES], 1.0, tl.float32)
            total = tl.zeros([QUERIES, WIDE], tl.float32) + v.to(tl.float32)[None, :]
        else:
            peak = tl.full([QUERIES], -1e30, tl.float32)
            mass = tl.zeros([QUERIES], tl.float32)
            total = tl.zeros([QUERIES, WIDE], tl.float32)
        share = tl.cdiv(tl.cdiv(here - first, SPLITS), COLUMNS) * COLUMNS
        low = first + split * share
        high = tl.minimum(low + share, here)
        shared = tl.load(source + row) * row_stride + of_head
        peak, mass, total = _over_columns(
            q, peak, mass, total, keys + shared, values + shared, low, tl.minimum(high, own), column_stride, scale,
            lane, WIDTH, COLUMNS,
        )  # fmt: skip
        alone = row * row_stride + of_head
        peak, mass, total = _over_columns(
            q, peak, mass, total, keys + alone, values + alone, tl.maximum(low, own), high, column_stride, scale,
            lane, WIDTH, COLUMNS,
        )  # fmt: skip
        heads: tl.constexpr = KEY_HEADS * GROUP
        number = (row * heads + head * GROUP + member) * SPLITS + split
        if SPLITS == 1:
            total = total / mass[:, None]
        else:
            tl.store(peaks + number, peak, mask=member < GROUP)
            tl.store(masses + number, mass, mask=member < GROUP)
        tl.store(out + number[:, None] * WIDTH + lane[None, :], total, mask=in_group)

    @triton.jit
    def _join(
        totals, peaks, masses, out, WIDTH: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, WAYS: tl.constexpr
    ):
        """The softmax of one head from those over parts of its columns."""
        head = tl.program_id(0).to(tl.int64)
        split = tl.arange(0, WAYS)
        lane = tl.arange(0, WIDE)
        there = split < SPLITS
        peak = tl.load(peaks + head * SPLITS + split, mask=there, other=float("-inf"))
        mass = tl.load(masses + head * SPLITS + split, mask=there, other=0.0)
        place = (head * SPLITS + split[:, None]) * WIDTH + lane[None, :]
        total = tl.load(totals + place, mask=there[:, None] & (lane < WIDTH)[None, :], other=0.0)
        weight = tl.exp2(peak - tl.max(peak, axis=0))
        joined = tl.sum(total * weight[:, None], axis=0) / tl.sum(mass * weight, axis=0)
        tl.store(out + head * WIDTH + lane, joined, mask=lane < WIDTH)


def attend_new_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    stored: Tensor,
    begin: Tensor,
    prompt_end: Tensor,
    source: Tensor,
    place: Tensor,
    scale: float,
) -> Tensor:
    """Rotates one token a row by its position, stores its key and value, and attends over the row's columns.

    Each row reads columns begin, ..., place and no others: those before `prompt_end` from the slot `source`, which
    holds the same there, the rest from its own. Rows of one prompt so read it from one place, which the GPU's cache
    serves. The softmax runs over blocks of columns (Milakov & Gimelshein 2018); where few rows have long caches,
    several programs share a row's columns and are joined after. Scores and sums are float32; float64 is rounded to it.

    Args:
        query: (B, heads * D), each row contiguous.
        key, value: (B, key heads * D), each row contiguous.
        cos, sin: (positions, D), contiguous, `sin` with the sign of the rotated half: negative in the first half.
        stored: (2, B, key heads, W, D) keys and values; the last two dimensions contiguous.
        begin, prompt_end, source, place: (B,) int64; begin <= place, and the position is place - begin.
        scale: factor on the scores.

    Returns:
        (B, heads * D).
    """
    keys, values = stored
    rows, key_heads, capacity, width = keys.shape
    group = query.shape[1] // (key_heads * width)
    out = query.new_empty(query.shape)
    splits = max(1, min(_BUSY // (rows * key_heads), capacity // _LEAST))
    precise = query.dtype not in (torch.bfloat16, torch.float16)
    queries: int = max(16, triton.next_power_of_2(group))
    wide: int = max(16, triton.next_power_of_2(width))
    # Many programs hide each other's waits, and small ones fit in greater numbers; few do better with large tiles.
    columns, warps, stages = (32, 2, 4) if rows * key_heads >= 2 * _BUSY else (128, 4, 3)
    bytes_of_column = 2 * wide * (8 if precise else query.element_size())
    while columns > 16 and columns * bytes_of_column * (stages - 1) > _TILES:
        columns //= 2
    while stages > 1 and columns * bytes_of_column * (stages - 1) > _TILES:
        stages -= 1
    partial, peaks, masses = out, out, out
    if splits > 1:
        partial = out.new_empty(rows, key_heads * group, splits, width, dtype=torch.float32)
        peaks = partial.new_empty(rows, key_heads * group, splits)
        masses = torch.empty_like(peaks)
    strides: Any = (*(x.stride(0) for x in (query, key, value)), *keys.stride()[:3])
    with on_device_of(query):
        _attend[(rows * key_heads, splits)](
            query, key, value, cos, sin, keys, values, begin, prompt_end, source, place, partial, peaks, masses,
            *strides, scale * 1.4426950408889634,  # scores in powers of two
            key_heads, group, width, queries, wide, columns, splits, precise, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if splits > 1:
            ways: int = triton.next_power_of_2(splits)
            _join[(rows * key_heads * group,)](partial, peaks, masses, out, width, wide, splits, ways, num_warps=1)
    return out
