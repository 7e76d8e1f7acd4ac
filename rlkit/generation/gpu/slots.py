"""Memory with fixed addresses for decoding: the rows that run, and what they write."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rlkit.engines.packing import distinct_prompts
from rlkit.generation.base import Generated, SamplingParams

__all__ = ["Buffers", "Rows", "take_in"]


@dataclass(frozen=True)
class Rows:
    """b slots that decode together; a row of the batch takes one, and leaves it to another when it has finished.

    Attributes:
        stored: (layers, 2, b, key heads, capacity, head width) keys and values.
        begin: (b,) int64, the column of the cache where the row's first token lies.
        prompt_end: (b,) int64, the column after its prompt.
        source: (b,) int64, a slot whose columns before `prompt_end` hold the same prompt; the own one will do.
        place: (b,) int64, the column that the token to take in goes to; `prompt_end` in slots that do not run.
        tokens: (b,) int64, the token to take in.
        running: (b,) bool; a slot that does not run repeats its last step and writes to a spare row.
        row: (b,) int64, the row of the batch that has the slot.
    """

    stored: Tensor
    begin: Tensor
    prompt_end: Tensor
    source: Tensor
    place: Tensor
    tokens: Tensor
    running: Tensor
    row: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """All but the cache, (b,) each."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "stored")

    @property
    def position(self) -> Tensor:
        """(b,) int64, the position of the token to take in."""
        return self.place - self.begin

    @property
    def time(self) -> Tensor:
        """(b,) int64, the number of the token that is sampled next; 1 in slots that do not run."""
        return self.place - self.prompt_end + 1

    def bias(self, width: int) -> Tensor:
        """(b, 1, 1, width) to add to attention scores over that many columns: -inf where nothing may be read."""
        column = torch.arange(width, device=self.place.device)
        unread = (column < self.begin.unsqueeze(1)) | (column > self.place.unsqueeze(1))
        return self.stored.new_zeros(unread.shape).masked_fill_(unread, float("-inf"))[:, None, None]

    def first(self, count: int) -> Rows:
        """The first `count` slots, in the same memory."""
        return Rows(self.stored[:, :, :count], *(part[:count] for part in self.state))

    def clear(self, width: int, spare: int) -> None:
        """Nobody runs; prompts will have `width` columns."""
        for part in (self.begin, self.prompt_end, self.place):
            part.fill_(width)
        self.source.copy_(torch.arange(len(self), device=self.source.device))
        self.tokens.zero_()
        self.running.zero_()
        self.row.fill_(spare)

    def move(self, places: Tensor, moving: Tensor, width: int) -> None:
        """Slots `moving` (k,) into slots `places` (k,), with `width` columns of the cache."""
        for part in self.state:
            part[places] = part[moving]
        written = self.stored[..., :width, :]
        written[:, :, places] = written[:, :, moving]

    def share_prompts(self, prompt_of: Tensor) -> None:
        """Rows that run read their prompt from the first of those slots that run with the same one.

        Args:
            prompt_of: (rows of the batch and the spare one,) int64, the number of each row's prompt, less than rows.
        """
        slot = torch.arange(len(self), device=self.row.device)
        prompt = prompt_of[self.row]
        first = slot.new_full((len(prompt_of),), len(self))
        first.scatter_reduce_(0, prompt, torch.where(self.running, slot, len(self)), "amin")
        self.source.copy_(torch.where(self.running, first[prompt], slot))


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
            begin=zeros(self.slots),
            prompt_end=zeros(self.slots),
            source=zeros(self.slots),
            place=zeros(self.slots),
            tokens=zeros(self.slots),
            running=zeros(self.slots, dtype=torch.bool),
            row=zeros(self.slots),
        )
        self.limit = zeros(1)  # tokens that a response may have
        self.uniforms = zeros(rows + 1, steps, dtype=torch.float64)
        self.ids = zeros(rows + 1, steps)
        self.logprobs = zeros(rows + 1, steps, dtype=torch.float32)
        self.mask = zeros(rows + 1, steps, dtype=torch.bool)
        self.prompt_of = zeros(rows + 1)

    def start(self, input_ids: Tensor, attention_mask: Tensor, uniforms: Tensor, pad_token_id: int) -> None:
        """Clears the output and takes prompts (B, P) and random numbers (B, T) of a call."""
        self.input_ids = input_ids
        first_of, prompt_of = distinct_prompts(input_ids, attention_mask)  # (U,) rows, (B,) numbers below U
        self.prompt_of[: len(prompt_of)] = prompt_of
        self._first_of, self._prompt_of = first_of.cpu(), prompt_of.cpu()
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

    def distinct(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct prompts of some rows, all on the host.

        Args:
            chosen: (k,) rows.

        Returns:
            rows of the batch that have the prompts (u,), and which of these each row has (k,).
        """
        numbers, row_of = torch.unique(self._prompt_of[chosen], return_inverse=True)
        return self._first_of[numbers], row_of

    def result(self, params: SamplingParams) -> Generated:
        """What the rows of the call have written so far."""
        count = len(self.input_ids)
        ids, mask, logprobs = self.ids[:count], self.mask[:count], self.logprobs[:count]
        lengths = mask.sum(1)
        width = int(lengths.max())
        last = ids.gather(1, (lengths - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        stopped = torch.isin(last, torch.tensor(params.stop_token_ids, dtype=torch.int64, device=last.device))
        return Generated(
            torch.cat([self.input_ids, ids[:, :width]], dim=1),
            mask[:, :width].clone(),
            logprobs[:, :width].clone(),
            ["stop" if stop else "length" for stop in stopped.tolist()],
        )


def take_in(buffers: Buffers, rows: Rows, tokens: Tensor, logprobs: Tensor, keeps: Tensor) -> None:
    """Writes down the sampled tokens of rows that run, and makes them what the next step takes in.

    Slots that do not run write to the spare row, and stand after their prompt, always in reach.

    Args:
        tokens, logprobs, keeps: (b,) what was sampled, and whether it lets its row go on.
    """
    time = rows.time
    buffers.write(torch.where(rows.running, rows.row, buffers.spare), time, tokens, logprobs)
    rows.running.logical_and_(keeps & (time + 1 < buffers.limit))
    rows.place.copy_(torch.where(rows.running, rows.place + 1, rows.prompt_end))
    rows.tokens.copy_(tokens)
