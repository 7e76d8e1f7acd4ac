"""Attention of a decoding step: one new token a row, over a cache where rows of one prompt read that from one slot."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.kernels import on_device_of

__all__ = ["attend_new_token", "no_arrivals"]

_BUSY = 200
"""Programs that keep a GPU busy: more than one for each multiprocessor of a large one."""
_LEAST = 96
"""Columns of the cache for each program that shares a pair of rows, at least."""
_MANY = 384
"""Programs that hide each other's waits, and of which small ones fit in greater numbers."""
_SMALL, _LARGE = 1 << 14, 1 << 15
"""Bytes of keys and values that a program asks for at once where there are many, and where there are few."""
_HELD = 80 << 10
"""Bytes of queries, and of keys and values on their way, that a program may have: of 99 KiB, which small GPUs share."""


if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _turned(x, angle, cos, sin, inside, HALF: tl.constexpr, WIDTH: tl.constexpr, lane):
        """Values at `x` + lane, rotated; the other half of a head has the partner of each."""
        partner = tl.where(lane < HALF, lane + HALF, lane - HALF)
        own = tl.load(x + lane, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(x + partner, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + angle + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        s = tl.load(sin + angle + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        return own * c + other * s

    @triton.jit
    def _joined(peak, mass, total, other_peak, other_mass, other_total):
        """One softmax from those over two sets of columns: peaks and masses (Q,), weighted sums of values (Q, D)."""
        higher = tl.maximum(peak, other_peak)
        shrink, other_shrink = tl.exp2(peak - higher), tl.exp2(other_peak - higher)
        mass = mass * shrink + other_mass * other_shrink
        return higher, mass, total * shrink[:, None] + other_total * other_shrink[:, None]

    @triton.jit(do_not_specialize=["count"])
    def _attend(
        query, key, value, cos, sin, keys, values, begin, prompt_end, source, place, out, peaks, masses, totals,
        arrivals, query_stride, key_stride, value_stride, row_stride, head_stride, column_stride, scale, count,
        KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, WIDE: tl.constexpr,
        COLUMNS: tl.constexpr, SHARED: tl.constexpr, PRECISE: tl.constexpr,
    ):  # fmt: skip
        number = tl.program_id(0)
        head = number % KEY_HEADS
        split, splits = tl.program_id(1), tl.num_programs(1)
        lane = tl.arange(0, WIDE)
        across = lane < WIDTH
        member = tl.arange(0, QUERIES)
        is_second = member >= QUERIES // 2
        in_row = member % (QUERIES // 2)
        half: tl.constexpr = WIDTH // 2

        row = (number // KEY_HEADS * 2).to(tl.int64)
        has_second = row + 1 < count
        second = tl.where(has_second, row + 1, row)
        here, second_here = tl.load(place + row).to(tl.int32), tl.load(place + second).to(tl.int32)
        begins, second_begins = tl.load(begin + row).to(tl.int32), tl.load(begin + second).to(tl.int32)
        prompt_ends, second_prompt_ends = (
            tl.load(prompt_end + row).to(tl.int32),
            tl.load(prompt_end + second).to(tl.int32),
        )
        from_slot, second_from = tl.load(source + row), tl.load(source + second)

        asker = tl.where(is_second, second, row)
        asked = query + asker[:, None] * query_stride + (head * GROUP + in_row[:, None]) * WIDTH
        angle = tl.where(is_second, second_here - second_begins, here - begins) * WIDTH
        asks = ((in_row < GROUP) & (row + is_second.to(tl.int64) < count))[:, None] & across[None, :]
        q = _turned(asked, angle[:, None], cos, sin, asks, half, WIDTH, lane[None, :])
        q = q.to(query.dtype.element_ty)
        if PRECISE:
            q = q.to(tl.float32)
        peak = tl.full([QUERIES], -1e30, tl.float32)
        mass = tl.zeros([QUERIES], tl.float32)
        total = tl.zeros([QUERIES, WIDE], tl.float32)
        of_head = head.to(tl.int64) * head_stride
        if split == 0:
            for each in tl.static_range(2):
                at = row if each == 0 else second
                column = here if each == 0 else second_here
                turn = (here - begins if each == 0 else second_here - second_begins) * WIDTH
                new = key + at * key_stride + head * WIDTH
                k = _turned(new, turn, cos, sin, across, half, WIDTH, lane).to(keys.dtype.element_ty)
                v = tl.load(value + at * value_stride + head * WIDTH + lane, mask=across, other=0.0)
                target = at * row_stride + of_head + column * column_stride + lane
                tl.store(keys + target, k, mask=across)
                tl.store(values + target, v, mask=across)
                score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale
                mine = is_second if each == 1 else member < QUERIES // 2
                peak = tl.where(mine, score, peak)
                total = tl.where(mine[:, None], v.to(tl.float32)[None, :], total)
            mass += 1.0

        # Columns in a line: [prompt of both or of the first | of the second | what the first has written | the second].
        both = (from_slot == second_from) & (begins == second_begins) & (prompt_ends == second_prompt_ends)
        end_prompt = prompt_ends - begins
        end_prompts = tl.where(both, end_prompt, end_prompt + second_prompt_ends - second_begins)
        end_first = end_prompts + here - prompt_ends
        end = tl.where(has_second, end_first + second_here - second_prompt_ends, end_first)
        in_prompt = from_slot * row_stride + of_head + begins * column_stride
        in_second_prompt = second_from * row_stride + of_head + (second_begins - end_prompt) * column_stride
        in_first = row * row_stride + of_head + (prompt_ends - end_prompts) * column_stride
        in_second = second * row_stride + of_head + (second_prompt_ends - end_first) * column_stride
        share = tl.cdiv(tl.cdiv(end, splits), COLUMNS) * COLUMNS
        low = split * share
        high = tl.minimum(low + share, end)
        for start in range(low, high, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            there = column < high
            own_part = tl.where(column < end_first, in_first, in_second)
            prompt_part = tl.where(column < end_prompt, in_prompt, in_second_prompt)
            found = tl.where(column < end_prompts, prompt_part, own_part) + column * column_stride
            k = tl.load(keys + found[None, :] + lane[:, None], mask=there[None, :] & across[:, None], other=0.0)
            of_first = (column < end_prompt) | ((column >= end_prompts) & (column < end_first))
            of_second = ((column < end_prompts) & (both | (column >= end_prompt))) | (column >= end_first)
            seen = tl.where(is_second[:, None], of_second[None, :], of_first[None, :]) & there[None, :]
            scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
            scores = tl.where(seen, scores * scale, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, axis=1))
            shrink = tl.exp2(peak - higher)
            shares = tl.exp2(scores - higher[:, None])
            mass = mass * shrink + tl.sum(shares, axis=1)
            v = tl.load(values + found[:, None] + lane[None, :], mask=there[:, None] & across[None, :], other=0.0)
            exact = q.dtype
            total = total * shrink[:, None] + tl.dot(shares.to(exact), v.to(exact), input_precision="ieee")
            peak = higher

        is_last = True  # known when this is compiled, unless programs share the rows
        if SHARED:
            # Whoever comes last joins what all found, in their order, so that the result is the same every time.
            part = (number * splits + split).to(tl.int64) * QUERIES + member
            tl.store(peaks + part, peak)
            tl.store(masses + part, mass)
            tl.store(totals + part[:, None] * WIDE + lane[None, :], total)
            tl.debug_barrier()
            is_last = tl.atomic_add(arrivals + number, 1, sem="acq_rel") == splits - 1
        if is_last:
            if SHARED:
                tl.store(arrivals + number, 0)
                peak = tl.full([QUERIES], -1e30, tl.float32)
                mass = tl.zeros([QUERIES], tl.float32)
                total = tl.zeros([QUERIES, WIDE], tl.float32)
                for each in range(splits):
                    part = (number * splits + each).to(tl.int64) * QUERIES + member
                    peak, mass, total = _joined(
                        peak, mass, total, tl.load(peaks + part, cache_modifier=".cg"),
                        tl.load(masses + part, cache_modifier=".cg"),
                        tl.load(totals + part[:, None] * WIDE + lane[None, :], cache_modifier=".cg"),
                    )  # fmt: skip
            result = asker * (KEY_HEADS * GROUP) + head * GROUP + in_row
            tl.store(out + result[:, None] * WIDTH + lane[None, :], total / mass[:, None], mask=asks)


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
    arrivals: Tensor,
) -> Tensor:
    """Rotates one token a row by its position, stores its key and value, and attends over the row's columns.

    Each row reads columns begin, ..., place and no others: those before `prompt_end` from the slot `source`, which
    holds the same there, the rest from its own. Rows of one prompt so read it from one place, which the GPU's cache
    serves, and two neighbours of one prompt read it once. The softmax runs over blocks of columns (Milakov & Gimelshein
    2018); where rows are few, several programs share the columns of two, and the last to finish joins what they found.
    Scores and sums are float32; float64 is rounded to it. A value that is not finite reaches its neighbour's row too.

    Args:
        query: (B, heads * D), each row contiguous.
        key, value: (B, key heads * D), each row contiguous.
        cos, sin: (positions, D), contiguous, `sin` with the sign of the rotated half: negative in the first half.
        stored: (2, B, key heads, W, D) keys and values; the last two dimensions contiguous.
        begin, prompt_end, source, place: (B,) int64; begin <= prompt_end <= place, and the position is place - begin.
            Nobody writes to the columns of a source: each of those slots has its own place at `prompt_end` or later.
        scale: factor on the scores.
        arrivals: from `no_arrivals`, which it is again afterwards; one for calls that run one after another.

    Returns:
        (B, heads * D).
    """
    keys, values = stored
    rows, key_heads, capacity, width = keys.shape
    group = query.shape[1] // (key_heads * width)
    out = query.new_empty(query.shape)
    precise = query.dtype not in (torch.bfloat16, torch.float16)
    pairs, queries = triton.cdiv(rows, 2), 2 * max(8, triton.next_power_of_2(group))
    wide: int = max(16, triton.next_power_of_2(width))
    bytes_of_query = wide * (8 if precise else query.element_size())
    tile = _tile(pairs * key_heads, capacity, 2 * bytes_of_query, queries * bytes_of_query)
    peaks = masses = totals = out  # not looked at where each row has one program
    if tile.splits > 1:
        totals = out.new_empty(pairs * key_heads, tile.splits, queries, wide, dtype=torch.float32)
        peaks, masses = totals.new_empty(2, pairs * key_heads, tile.splits, queries)
    strides: Any = (*(x.stride(0) for x in (query, key, value)), *keys.stride()[:3])
    with on_device_of(query):
        _attend[(pairs * key_heads, tile.splits)](
            query, key, value, cos, sin, keys, values, begin, prompt_end, source, place, out, peaks, masses, totals,
            arrivals, *strides, scale * 1.4426950408889634,  # scores in powers of two
            rows, key_heads, group, width, queries, wide, tile.columns, tile.splits > 1, precise,
            num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
    return out


def no_arrivals(device: torch.device) -> Tensor:
    """How many programs of those that share rows have finished: none."""
    return torch.zeros(_BUSY, dtype=torch.int32, device=device)


class _Tile(NamedTuple):
    splits: int
    columns: int
    stages: int


def _tile(programs: int, capacity: int, bytes_of_column: int, bytes_of_queries: int) -> _Tile:
    """How a pair of rows is cut.

    Args:
        programs: pairs of rows times key heads.
        capacity: columns of the cache.
        bytes_of_column: of a key and a value.
        bytes_of_queries: of all queries of a program.
    """
    splits = max(1, min(_BUSY // programs, capacity // _LEAST))
    asked = _SMALL if programs >= _MANY else _LARGE
    columns: int = min(max(asked // bytes_of_column, 16), 128)
    stages = max(1, min(3, (_HELD - bytes_of_queries) // (columns * bytes_of_column)))
    return _Tile(splits, columns, stages + 1)
