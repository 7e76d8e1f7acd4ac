"""Batches scored in parts that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.batch import RolloutBatch
from rlkit.data.pairs import PreferenceBatch
from rlkit.engines.budget import Load, TokenBudget, is_out_of_memory

__all__ = ["free_cached", "in_parts", "load_of", "narrowed"]


def load_of(batch: RolloutBatch | PreferenceBatch) -> Load:
    """What the units of a batch, rollouts or pairs, weigh in tokens; a pair reads its prompt once."""
    pairs = isinstance(batch, PreferenceBatch)
    rows = batch.rollouts if isinstance(batch, PreferenceBatch) else batch
    prompts, responses = rows.attention_mask.sum(1).cpu(), rows.response_lengths.cpu()
    if pairs:
        sides = responses.view(-1, 2)
        return Load(prompts[0::2], sides.sum(1), torch.arange(len(prompts) // 2), sides.amax(1), rows=2)
    return Load(prompts, responses, rows.groups.cpu() if "groups" in rows else torch.arange(len(prompts)))


def narrowed(batch: RolloutBatch, rows: Tensor) -> RolloutBatch:
    """The batch without the rollouts for which `rows`, (B,) bool, is false; the first one alone where none is true."""
    if bool(rows.all()):
        return batch
    return batch.select(rows.nonzero().squeeze(1).cpu() if rows.any() else slice(0, 1))


def in_parts(
    budget: TokenBudget,
    batch: RolloutBatch,
    packed: bool,
    score: Callable[[RolloutBatch], Mapping[str, Tensor]],
    needed: Tensor | None = None,
) -> dict[str, Tensor]:
    """`score(batch)`, part by part; a part that does not fit in memory is cut in half and scored again.

    Args:
        budget: how much goes at once.
        batch: B rollouts.
        packed: whether the model lays sequences end to end.
        score: gives columns (b,) or (b, t) for b rollouts trimmed to t columns of responses; 0 at padding.
        needed: (B,) bool, rollouts of which the columns are not 0 throughout; None for all.

    Returns:
        The same columns, (B,) or (B, T).
    """
    if needed is not None and 0 < int(needed.sum()) < len(batch):
        rows = needed.nonzero().squeeze(1)
        found = in_parts(budget, batch.select(rows.cpu()), packed, score)
        return {
            name: column.new_zeros(len(batch), *column.shape[1:]).index_copy(0, rows.to(column.device), column)
            for name, column in found.items()
        }
    load, columns = load_of(batch), dict[str, Tensor]()
    waiting = budget.parts(load, packed)
    while waiting:
        rows = waiting.pop(0)
        whole = len(rows) == len(batch)
        try:
            scored = score(batch if whole else batch.select(rows).trim())
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            scored = None  # tried again below, where the error no longer holds what was computed
        if scored is None:
            free_cached()
            budget.shrink(load.tokens(rows, packed), alone=len(rows) == 1)
            waiting = [rows[part] for part in budget.parts(load.select(rows), packed)] + waiting
        elif whole:
            return dict(scored)
        else:
            for name, column in scored.items():
                shape = (len(batch), *(() if column.dim() == 1 else (batch.response_width,)))
                into = columns.setdefault(name, column.new_zeros(shape))
                index = rows.to(column.device)
                into[index] = column if column.dim() == 1 else pad(column, (0, shape[1] - column.shape[1]))
    return columns


def free_cached() -> None:
    """Gives memory that torch keeps for later back to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
