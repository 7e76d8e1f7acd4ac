"""How much goes through a model at once: parts of a batch under a limit of tokens, which falls when memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from rlkit.errors import ModelError

__all__ = ["Load", "TokenBudget", "free_bytes", "is_out_of_memory"]

_PROBE = 2048
"""Tokens of the first part, from which the memory of a token is learned."""
_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""Part of the free memory that is planned with; the rest is for what is not proportional to tokens."""


@dataclass(frozen=True)
class Load:
    """What the units of a batch (rollouts, pairs) weigh.

    Attributes:
        prompts: (U,) int64, prompt tokens.
        responses: (U,) int64, response tokens, of both sides of a pair.
        groups: (U,) int64, equal where units have the same prompt.
        longest: (U,) int64, tokens of a unit's longest response; None where it has only one.
        rows: sequences of a unit: 1, or 2 of a pair.
    """

    prompts: Tensor
    responses: Tensor
    groups: Tensor
    longest: Tensor | None = None
    rows: int = 1

    def select(self, units: Tensor) -> Load:
        """The load of some units."""
        longest = None if self.longest is None else self.longest[units]
        return Load(self.prompts[units], self.responses[units], self.groups[units], longest, self.rows)

    def tokens(self, units: Tensor, packed: bool) -> int:
        """Tokens that a forward over some units computes, laid end to end or padded to the longest."""
        tally = _Tally(self.rows, packed)
        for unit in self.select(units).by_unit():
            tally.add(*unit)
        return tally.tokens

    def by_unit(self) -> list[tuple[int, int, int, int]]:
        """Prompt, responses, longest response and group of each unit."""
        longest = self.responses if self.longest is None else self.longest
        columns = (self.prompts, self.responses, longest, self.groups)
        return list(zip(*(column.tolist() for column in columns), strict=True))


class _Tally:
    """Tokens of a part, unit by unit."""

    def __init__(self, rows: int, packed: bool) -> None:
        self.rows, self.packed = rows, packed
        self.units = self.prompts = self.distinct = self.responses = 0
        self.longest_prompt = self.longest_response = 0
        self.groups: set[int] = set()

    def add(self, prompt: int, responses: int, longest: int, group: int) -> None:
        self.units += 1
        self.prompts += prompt
        self.responses += responses
        self.distinct += 0 if group in self.groups else prompt
        self.groups.add(group)
        self.longest_prompt = max(self.longest_prompt, prompt)
        self.longest_response = max(self.longest_response, longest)

    @property
    def tokens(self) -> int:
        if not self.packed:  # prompts end and responses begin in one column
            return self.rows * self.units * (self.longest_prompt + self.longest_response)
        shared = 2 * len(self.groups) <= self.units  # as `rlkit.engines.packing.pack` decides
        return self.responses + (self.distinct if shared else self.prompts)


class TokenBudget:
    """Cuts batches into parts that fit.

    Args:
        units: most units (rollouts, pairs) of a part; None for any number.
        tokens: most tokens of a part, never exceeded unless one unit alone is longer; None for any number.
        dynamic: size parts by the free memory, up to `tokens`.
    """

    def __init__(self, units: int | None = None, tokens: int | None = None, dynamic: bool = False) -> None:
        self.units, self.tokens, self.dynamic = units, tokens, dynamic
        self.ceiling: int | None = None
        """Tokens above which memory has run out before."""
        self.bytes_per_token: float | None = None
        """Learned from the first part under `measured`; None until then."""
        self._room: int | None = None

    @property
    def limit(self) -> int | None:
        """Tokens of a part at most, as things stand; None for any number."""
        limits = [limit for limit in (self.tokens, self.ceiling, self._room) if limit is not None]
        if self.dynamic and self.bytes_per_token is None:
            limits.append(_PROBE)
        return min(limits, default=None)

    def look_at_memory(self, device: torch.device) -> None:
        """Sizes the next parts by the memory that is free now, once it is known what a token takes."""
        if self.dynamic and self.bytes_per_token is not None:
            share = _SHARE.get(device.type, _SHARE["cuda"])
            self._room = max(_PROBE, int(share * free_bytes(device) / self.bytes_per_token))

    def parts(self, load: Load, packed: bool) -> list[Tensor]:
        """Units of each part, (u,) int64 on the CPU; every unit is in one of them.

        Without a limit of tokens parts are consecutive units. Else units of one prompt stay together, and units of
        like length meet, so that little is computed twice or padded.

        Args:
            load: what the units weigh.
            packed: whether they are laid end to end, a prompt once a part where `pack` shares them, rather than padded
                to the longest.
        """
        total, limit = len(load.prompts), self.limit
        if limit is None:
            return list(torch.split(torch.arange(total), self.units or max(total, 1)))
        units = load.by_unit()
        order = sorted(range(total), key=lambda u: (units[u][3] if packed else units[u][0] + units[u][1], u))
        parts: list[list[int]] = []
        tally = _Tally(load.rows, packed)
        for unit in order:
            tally.add(*units[unit])
            if not parts or tally.tokens > limit or len(parts[-1]) == self.units:
                parts.append([])
                tally = _Tally(load.rows, packed)
                tally.add(*units[unit])
            parts[-1].append(unit)
        return [torch.tensor(sorted(part)) for part in parts]

    def shrink(self, tokens: int, alone: bool) -> None:
        """Halves the limit after parts did not fit in memory.

        Args:
            tokens: of the largest part that was tried.
            alone: whether no part had more than one unit.

        Raises:
            ModelError: a unit alone was too much.
        """
        if alone:
            raise ModelError(
                f"memory ran out on a single sequence of {tokens} tokens: set activations='recompute', lower "
                "max_new_tokens or max_prompt_length, or take a smaller model"
            )
        self.ceiling = max(1, min(tokens, self.limit or tokens) // 2)

    @contextlib.contextmanager
    def measured(self, tokens: int, device: torch.device) -> Iterator[None]:
        """Learns from the block what memory a forward and backward over `tokens` tokens takes."""
        if not self.dynamic or self.bytes_per_token is not None or tokens < 1:
            yield
            return
        with _peak_of(device) as used:
            yield
        self.bytes_per_token = max(used[0] / tokens, 1.0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on a device: on a GPU those that torch holds unused count, on the CPU the host's."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


@contextlib.contextmanager
def _peak_of(device: torch.device) -> Iterator[list[float]]:
    """One number, after the block: bytes it took at its peak; on the CPU those kept for the backward pass."""
    used = [0.0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield used
        used[0] = float(torch.cuda.max_memory_allocated(device) - before)
        return
    seen: set[int] = set()

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if not isinstance(saved, torch.nn.Parameter) and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            used[0] += storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        yield used
