"""Turns token lists into padded, sharded and packed tensors, and columns from one width to another.

Masks are made from known lengths, never by comparing ids with a padding id: a token that the policy sampled is real
even when its id equals the padding id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.errors import DataError

if TYPE_CHECKING:
    from rlkit.batch import RolloutBatch

__all__ = ["DataCollector", "PackedBatch", "mask_from_lengths", "resize_column"]


def mask_from_lengths(lengths: Tensor | Sequence[int], width: int) -> Tensor:
    """Right-padded mask (N, width) bool: true on the first `lengths[i]` columns of row i.

    Raises:
        DataError: a length is negative or larger than `width`.
    """
    sizes = torch.as_tensor(lengths, dtype=torch.int64)
    if sizes.ndim != 1:
        raise DataError(f"lengths must be one number per row, given shape {tuple(sizes.shape)}")
    if sizes.numel() and (int(sizes.min()) < 0 or int(sizes.max()) > width):
        raise DataError(f"lengths must be within 0..{width}, given {sizes.tolist()}")
    return torch.arange(width, device=sizes.device) < sizes[:, None]


def _fit(column: Tensor, dim: int, width: int, fill: int, left: bool) -> Tensor:
    """Pad or cut dimension `dim` to `width`, at its left or right end."""
    change = width - column.shape[dim]
    if change <= 0:
        return column.narrow(dim, -change if left else 0, width)
    edges = [0, 0] * (column.ndim - dim - 1) + ([change, 0] if left else [0, change])
    return pad(column, edges, value=bool(fill) if column.dtype == torch.bool else fill)


def resize_column(column: Tensor, dims: Sequence[str], old: dict[str, int], new: dict[str, int], fill: int) -> Tensor:
    """A column whose P, T and L dimensions have other widths: prompts change at the left, responses at the right.

    Args:
        column: tensor with one dimension per letter of `dims`.
        old, new: widths under "P" and "T" (both need "P" and "T" where `dims` has "L").
        fill: value of new cells.
    """
    for dim, letter in enumerate(dims):
        if letter == "L":
            prompt, response = column.narrow(dim, 0, old["P"]), column.narrow(dim, old["P"], old["T"])
            blocks = [_fit(prompt, dim, new["P"], fill, left=True), _fit(response, dim, new["T"], fill, left=False)]
            column = torch.cat(blocks, dim)
        elif letter in ("P", "T"):
            column = _fit(column, dim, new[letter], fill, left=letter == "P")
    return column


@dataclass(frozen=True)
class PackedBatch:
    """B sequences laid end to end without padding, in the form that variable-length attention kernels take.

    Attributes:
        input_ids: (N,) int64, N real tokens of all rows.
        position_ids: (N,) int64, starting at 0 in each sequence.
        cu_seqlens: (B + 1,) int32, sequence i occupies `cu_seqlens[i]:cu_seqlens[i + 1]`.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor


class DataCollector:
    """Pads, slices, aligns, shards and packs.

    Args:
        pad_token_id: id put into padding cells; its value never decides what is padding.
    """

    def __init__(self, pad_token_id: int) -> None:
        if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, int) or pad_token_id < 0:
            raise DataError(f"pad_token_id must be a token id (int >= 0), given {pad_token_id!r}")
        self.pad_token_id = pad_token_id

    def _pad(self, rows: Sequence[Sequence[int]], width: int | None, left: bool) -> tuple[Tensor, Tensor]:
        if len(rows) == 0:
            raise DataError("cannot collate an empty list of token rows")
        lengths = [len(row) for row in rows]
        width = max(max(lengths), 1) if width is None else width
        mask = mask_from_lengths(lengths, width)
        mask = mask.flip(1) if left else mask
        ids = torch.full((len(rows), width), self.pad_token_id, dtype=torch.int64)
        ids[mask] = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        return ids, mask

    def collate_prompts(self, token_ids: Sequence[Sequence[int]], width: int | None = None) -> dict[str, Tensor]:
        """Left-padded prompts: {"input_ids" (B, P) int64, "attention_mask" (B, P) bool}.

        Args:
            token_ids: B lists of ids, unpadded.
            width: P; the longest prompt when left out.

        Raises:
            DataError: no rows, an empty prompt, or one longer than `width`.
        """
        for index, row in enumerate(token_ids):
            if len(row) == 0:
                raise DataError(f"prompt {index} has no tokens; a prompt needs at least one")
        ids, mask = self._pad(token_ids, width, left=True)
        return {"input_ids": ids, "attention_mask": mask}

    def collate_responses(self, token_ids: Sequence[Sequence[int]], width: int | None = None) -> dict[str, Tensor]:
        """Right-padded responses: {"response_ids" (B, T) int64, "response_mask" (B, T) bool}.

        Args:
            token_ids: B lists of the ids that were sampled, the end token included, nothing after it.
            width: T; the longest response when left out.
        """
        ids, mask = self._pad(token_ids, width, left=False)
        return {"response_ids": ids, "response_mask": mask}

    def collate(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Batch fields of finished rollouts: input_ids, attention_mask, generated_ids (B, L), response_mask."""
        if len(prompts) != len(responses):
            raise DataError(f"{len(prompts)} prompts and {len(responses)} responses; expected one response per prompt")
        fields, tail = self.collate_prompts(prompts), self.collate_responses(responses)
        fields["generated_ids"] = torch.cat([fields["input_ids"], tail["response_ids"]], dim=1)
        fields["response_mask"] = tail["response_mask"]
        return fields

    def pad(
        self, batch: "RolloutBatch", prompt_width: int | None = None, response_width: int | None = None
    ) -> "RolloutBatch":
        """The batch padded to the given widths; narrower than the batch is an error (use `batch.trim()` to narrow)."""
        for name, asked, have in (
            ("prompt", prompt_width, "prompt_width"),
            ("response", response_width, "response_width"),
        ):
            if asked is not None and asked < getattr(batch, have):
                raise DataError(
                    f"cannot pad {name}s from width {getattr(batch, have)} to {asked}; expected a larger width"
                )
        return batch.resize(prompt_width, response_width, self.pad_token_id)

    def align(self, batches: Sequence["RolloutBatch"]) -> list["RolloutBatch"]:
        """The same batches padded to their common widths."""
        prompt, response = max(b.prompt_width for b in batches), max(b.response_width for b in batches)
        return [self.pad(batch, prompt, response) for batch in batches]

    def slice(self, batch: "RolloutBatch", start: int, stop: int) -> "RolloutBatch":
        """Rows `start` to `stop`, without the columns that are padding in all of them."""
        return batch.select(slice(start, stop)).trim()

    def shard(self, batch: "RolloutBatch", rank: int, world: int) -> "RolloutBatch":
        """The consecutive rows of one rank; sizes differ by one row at most.

        Raises:
            DataError: `rank` is not within the world, or there are fewer rows than ranks.
        """
        if not 0 <= rank < world:
            raise DataError(f"rank must be within 0..{world - 1}, given {rank}")
        if batch.batch_size < world:
            raise DataError(
                f"cannot share {batch.batch_size} rows among {world} ranks; expected a row or more for each"
            )
        return batch.select(slice(batch.batch_size * rank // world, batch.batch_size * (rank + 1) // world))

    def pack(self, batch: "RolloutBatch") -> PackedBatch:
        """Prompt and response tokens of all rows, end to end, without padding."""
        mask = batch.full_attention_mask
        ends = mask.sum(1).cumsum(0)
        cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        return PackedBatch(batch["generated_ids"][mask], batch.position_ids[mask], cu_seqlens)

    def unpack(self, packed: Tensor, batch: "RolloutBatch") -> Tensor:
        """Per-token values (N, ...) of `pack(batch)` back in their cells (B, L, ...); padding cells are 0."""
        mask = batch.full_attention_mask
        if packed.shape[0] != int(mask.sum()):
            raise DataError(f"the batch has {int(mask.sum())} real tokens, given {packed.shape[0]} packed values")
        out = packed.new_zeros((*mask.shape, *packed.shape[1:]))
        out[mask] = packed
        return out
