"""Batches scored in parts that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.batch import RolloutBatch
from rlkit.data.pairs import PreferenceBatch
from rlkit.engines.budget import Load, TokenBudget, is_out_of_memory

__all__ = ["free_cached", "in_parts", "load_of"]


def load_of(batch: RolloutBatch | PreferenceBatch) -> Load:
    """What the units of a batch, rollouts or pairs, weigh in tokens; a pair reads its prompt once."""
    pairs = isinstance(batch, PreferenceBatch)
    rows = batch.rollouts if isinstance(batch, PreferenceBatch) else batch
    prompts, responses = rows.attention_mask.sum(1).cpu(), rows.response_lengths.cpu()
    if pairs:
        sides = responses.view(-1, 2)
        return Load(prompts[0::2], sides.sum(1), torch.arange(len(prompts) // 2), sides.amax(1), rows=2)
    return Load(prompts, responses, rows.groups.cpu() if "groups" in rows else torch.arange(len(prompts)))


def in_parts(
    budget: TokenBudget, batch: RolloutBatch, packed: bool, score: Callable[[RolloutBatch], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """`score(batch)`, part by part; a part that does not fit in memory is cut in half and scored again.

    Args:
        budget: how much goes at once.
        batch: B rollouts.
        packed: whether the model lays sequences end to end.
        score: gives columns (b,) or (b, t) for b rollouts trimmed to t columns of responses; 0 at padding.

    Returns:
        The same columns, (B,) or (B, T).
    """
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
