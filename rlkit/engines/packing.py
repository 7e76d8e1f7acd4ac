"""Rollouts laid end to end without padding, each distinct prompt once: what a forward of the trainer computes on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Packed", "distinct_prompts", "pack", "pack_sequences"]


@dataclass(frozen=True)
class Packed:
    """N tokens in S segments; the tokens of a segment attend to its own keys, causally, from the end backwards.

    A segment is a whole sequence, or, where prompts repeat, a prompt or a response that continues one. The keys of such
    a response are those of its prompt, then its own.

    Attributes:
        ids: (N,) int64.
        positions: (N,) int64, counted from 0 within each sequence.
        query_starts: (S+1,) int32, where the tokens of each segment start.
        key_starts: (S+1,) int32, where the keys of each segment start in the order of `keys`.
        longest_query, longest_key: most tokens and most keys of one segment.
        keys: (M,) int64, which token each key belongs to; None where every segment has the keys of its own tokens.
        predicts: (R,) int64, the tokens whose states are read: for each of R response tokens, row by row, the one that
            predicts it.
    """

    ids: Tensor
    positions: Tensor
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int
    keys: Tensor | None
    predicts: Tensor


def distinct_prompts(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows hold the same prompt.

    Args:
        input_ids: (B, P) int64, padded on the left.
        attention_mask: (B, P) bool.

    Returns:
        first (U,): the first row of each of the U distinct prompts; row_of (B,): which of them each row holds.
    """
    rows = torch.cat([input_ids * attention_mask, attention_mask.long()], dim=1)
    _, row_of = torch.unique(rows, dim=0, return_inverse=True)
    first = row_of.new_full((int(row_of.max()) + 1,), len(rows))
    return first.scatter_reduce(0, row_of, torch.arange(len(rows), device=rows.device), "amin"), row_of


def pack(batch_ids: Tensor, attention_mask: Tensor, prompt_width: int) -> Packed:
    """The layout of a batch. The last token of a response predicts nothing that is scored, and is left out.

    Prompts are shared where that saves tokens, that is where at least every second row repeats one.

    Args:
        batch_ids: (B, L) int64, prompt block padded on the left, then response padded on the right.
        attention_mask: (B, L) bool; at least one token of each prompt is true.
        prompt_width: P, width of the prompt block.
    """
    attention_mask = attention_mask.bool()
    prompts, responses = attention_mask[:, :prompt_width], attention_mask[:, prompt_width:]
    first, row_of = distinct_prompts(batch_ids[:, :prompt_width], prompts)
    sizes = prompts.sum(1), responses.sum(1)
    read = responses.clone()
    read.scatter_(1, (sizes[1] - 1).clamp_min(0).unsqueeze(1), False)
    if 2 * len(first) > len(batch_ids):
        return _whole_sequences(batch_ids, torch.cat([prompts, read], dim=1), sizes)
    return _shared_prompts(batch_ids, prompts, read, sizes, first, row_of)


def pack_sequences(ids: Tensor, mask: Tensor) -> Packed:
    """The layout of whole sequences (B, L), one segment each, of which the state at the last token (B,) is read."""
    mask = mask.bool()
    lengths = mask.sum(1)
    starts = _starts(lengths)
    return Packed(
        ids=ids[mask],
        positions=_places_within(lengths),
        query_starts=starts.int(),
        key_starts=starts.int(),
        longest_query=int(lengths.max()),
        longest_key=int(lengths.max()),
        keys=None,
        predicts=starts[1:] - 1,
    )


def _whole_sequences(batch_ids: Tensor, read: Tensor, sizes: tuple[Tensor, Tensor]) -> Packed:
    whole = pack_sequences(batch_ids, read)
    rows, places = _response_places(sizes[1])
    return replace(whole, predicts=whole.query_starts.long()[rows] + sizes[0][rows] - 1 + places)


def _shared_prompts(
    batch_ids: Tensor, prompts: Tensor, read: Tensor, sizes: tuple[Tensor, Tensor], first: Tensor, row_of: Tensor
) -> Packed:
    """Segments: the distinct prompts, then the responses that have a token to read."""
    width, count = prompts.shape[1], len(first)
    prompt_lengths, tails = sizes[0][first], read.sum(1)
    queries = torch.cat([prompt_lengths, tails])
    starts = _starts(queries)
    total = int(prompt_lengths.sum())
    # Keys of a prompt are its tokens; those of a response its prompt's, then its own.
    key_lengths = torch.cat([prompt_lengths, sizes[0] + tails])
    within = _places_within(key_lengths)
    segment = torch.arange(len(key_lengths), device=within.device).repeat_interleave(key_lengths)
    prompt_of = torch.cat([torch.arange(count, device=row_of.device), row_of])[segment]
    shared = prompt_lengths[prompt_of]
    keys = torch.where(within < shared, starts[prompt_of] + within, starts[segment] + within - shared)
    rows, places = _response_places(sizes[1])
    prompt = row_of[rows]
    last = starts[prompt] + prompt_lengths[prompt] - 1
    kept = torch.cat([queries.new_ones(count, dtype=torch.bool), tails > 0])
    return Packed(
        ids=torch.cat([batch_ids[first, :width][prompts[first]], batch_ids[:, width:][read]]),
        positions=_places_within(queries) + torch.cat([queries.new_zeros(total), sizes[0].repeat_interleave(tails)]),
        query_starts=_starts(queries[kept]).int(),
        key_starts=_starts(key_lengths[kept]).int(),
        longest_query=int(queries.max()),
        longest_key=int(key_lengths.max()),
        keys=keys[kept[segment]],
        predicts=torch.where(places == 0, last, starts[count + rows] + places - 1),
    )


def _starts(lengths: Tensor) -> Tensor:
    """(S,) lengths -> (S+1,) where each begins, and where the last one ends."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _places_within(lengths: Tensor) -> Tensor:
    """0, 1, 2, ... within each of S pieces laid end to end."""
    return torch.arange(int(lengths.sum()), device=lengths.device) - _starts(lengths)[:-1].repeat_interleave(lengths)


def _response_places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Row and place within its response of every response token, row by row."""
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    return rows, _places_within(lengths)
