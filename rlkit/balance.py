"""Splits work into parts of about the same size."""

import heapq
from collections.abc import Sequence
from typing import TypeAlias

from rlkit.errors import DataError

__all__ = ["balanced_partitions"]

_Part: TypeAlias = tuple[int, list[int]]
"""Sum of the lengths, and the indices that make it."""


def balanced_partitions(lengths: Sequence[int], k: int, equal_size: bool = False) -> list[list[int]]:
    """Indices of `lengths` in k parts with sums as equal as the differencing method makes them.

    Karmarkar & Karp 1982, "The differencing method of set partitioning": keep partial solutions of k parts each, and
    join the two whose parts differ most, largest part with smallest, until one is left. O(n k log(n k)).

    Args:
        lengths: n numbers of 0 or more, such as tokens per sequence.
        k: number of parts, 1 to n.
        equal_size: every part gets n / k indices, for work that is dealt out in equal shares.

    Returns:
        k lists of indices, none empty, each in rising order; every index is in one of them. The same for the same
        input, on every rank.

    Raises:
        DataError: a negative length, k out of range, or `equal_size` with n not a multiple of k.
    """
    n = len(lengths)
    if not 1 <= k <= n:
        raise DataError(f"cannot make {k} non-empty parts of {n} sequences; expected 1 to {n} parts")
    if equal_size and n % k:
        raise DataError(f"cannot deal {n} sequences into {k} parts of equal size; expected a multiple of {k}")
    if min(lengths) < 0:
        raise DataError(f"lengths must be 0 or more, given {min(lengths)}")
    order = sorted(range(n), key=lambda index: (lengths[index], index))
    step = k if equal_size else 1
    heap: list[tuple[int, int, list[_Part]]] = []
    for serial, start in enumerate(range(0, n, step)):
        parts: list[_Part] = [(lengths[index], [index]) for index in order[start : start + step]]
        parts += [(0, []) for _ in range(k - len(parts))]
        heapq.heappush(heap, _state(parts, serial))
    for serial in range(len(heap), 2 * len(heap) - 1):
        (_, _, wide), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(wide, reversed(other), strict=True)]
        heapq.heappush(heap, _state(joined, serial))
    return sorted(sorted(indices) for _, indices in heap[0][2])


def _state(parts: list[_Part], serial: int) -> tuple[int, int, list[_Part]]:
    """A partial solution as the heap wants it: widest first, then oldest; its parts from large to small.

    Of parts with equal sums the one with more indices counts as larger, so that empty parts are filled first.
    """
    parts.sort(key=lambda part: (part[0], len(part[1])), reverse=True)
    return parts[-1][0] - parts[0][0], serial, parts
