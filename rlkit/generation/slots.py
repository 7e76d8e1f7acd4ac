"""Memory with fixed addresses for decoding: the rows that run, and what they write."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rlkit.generation.base import Generated, SamplingParams

__all__ = ["Buffers", "Rows"]


@dataclass(frozen=True)
class Rows:
    """b slots that decode together; a row of the batch takes one, and leaves it to another when it has finished.

    Attributes:
        stored: (layers, 2, b, key heads, capacity, head width) keys and values.
        bias: (b, 1, 1, capacity) added to attention scores: -inf where nothing may be read.
        lengths: (b, 1) int64, position of the token to take in.
        place: (b,) int64, the column of the cache that it goes to; 0 in slots that do not run.
        time: (b,) int64, number of the token that is sampled next; 0 in slots that do not run.
        tokens: (b,) int64, the token to take in.
        running: (b,) bool; a slot that does not run repeats its last step and writes to a spare row.
        row: (b,) int64, the row of the batch that has the slot.
    """

    stored: Tensor
    bias: Tensor
    lengths: Tensor
    place: Tensor
    time: Tensor
    tokens: Tensor
    running: Tensor
    row: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """All but the cache, (b, ...) each."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "stored")

    def first(self, count: int) -> Rows:
        """The first `count` slots, in the same memory."""
        return Rows(self.stored[:, :, :count], *(part[:count] for part in self.state))

    def clear(self, width: int, spare: int) -> None:
        """Nobody runs; what is read before a prompt of `width` columns comes is finite."""
        self.bias.fill_(float("-inf"))
        self.bias[..., :width] = 0.0
        self.lengths.fill_(1)
        self.place.zero_()
        self.time.zero_()
        self.running.zero_()
        self.row.fill_(spare)

    def move(self, places: Tensor, moving: Tensor, width: int) -> None:
        """Slots `moving` (k,) into slots `places` (k,), with `width` columns of the cache."""
        for part in self.state:
            part[places] = part[moving]
        written = self.stored[..., :width, :]
        written[:, :, places] = written[:, :, moving]


class Buffers:
    """Slots, and for each row of a batch its random numbers and what it has written.

    Args:
        shape: (layers, 2, slots, key heads, capacity, head width) of the cache.
        rows: most rows of a batch.
        steps: most tokens a response may have.
        dtype, device: of the cache.
    """

    def __init__(self, shape: tuple[int, ...], rows: int, steps: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.capacity, self.count, self.steps = shape[2], shape[4], rows, steps
        self.spare = rows  # the row that nobody reads

        def zeros(*dims: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(dims, dtype=dtype, device=device)

        self.rows = Rows(
            stored=torch.zeros(shape, dtype=dtype, device=device),
            bias=zeros(self.slots, 1, 1, self.capacity, dtype=dtype),
            lengths=zeros(self.slots, 1),
            place=zeros(self.slots),
            time=zeros(self.slots),
            tokens=zeros(self.slots),
            running=zeros(self.slots, dtype=torch.bool),
            row=zeros(self.slots),
        )
        self.limit = zeros(1)  # tokens that a response may have
        self.uniforms = zeros(rows + 1, steps, dtype=torch.float64)
        self.ids = zeros(rows + 1, steps)
        self.logprobs = zeros(rows + 1, steps, dtype=torch.float32)
        self.mask = zeros(rows + 1, steps, dtype=torch.bool)

    def start(self, uniforms: Tensor, pad_token_id: int) -> None:
        """Clears the output and takes the random numbers (B, T) of a call."""
        self.uniforms[: len(uniforms), : uniforms.shape[1]] = uniforms
        self.limit.fill_(uniforms.shape[1])
        self.ids.fill_(pad_token_id)
        self.logprobs.zero_()
        self.mask.zero_()

    def write(self, row: Tensor, time: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Tokens (b,) that rows (b,) sampled at times (b,)."""
        self.ids.index_put_((row, time), tokens)
        self.logprobs.index_put_((row, time), logprobs)
        self.mask.index_put_((row, time), torch.ones_like(row, dtype=torch.bool))

    def result(self, input_ids: Tensor, params: SamplingParams) -> Generated:
        """What the rows of `input_ids` have written so far."""
        count = len(input_ids)
        ids, mask, logprobs = self.ids[:count], self.mask[:count], self.logprobs[:count]
        lengths = mask.sum(1)
        width = int(lengths.max())
        last = ids.gather(1, (lengths - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        stopped = torch.isin(last, torch.tensor(params.stop_token_ids, dtype=torch.int64, device=last.device))
        return Generated(
            torch.cat([input_ids, ids[:, :width]], dim=1),
            mask[:, :width].clone(),
            logprobs[:, :width].clone(),
            ["stop" if stop else "length" for stop in stopped.tolist()],
        )
