"""Pairs of responses, laid out as rollouts so that one forward scores both sides of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlkit.batch import RolloutBatch
from rlkit.collate import DataCollector
from rlkit.data.preferences import PreferenceRow
from rlkit.errors import DataError

__all__ = ["PreferenceBatch"]


class PreferenceBatch:
    """N pairs on a `RolloutBatch` of 2N rows: row 2i is the chosen response of pair i, row 2i + 1 the rejected one.

        pairs = PreferenceBatch.from_rows(source.next(4), pad_token_id=0)
        pairs.rollouts.generated_ids        # (8, L)
        pairs.chosen("responses")           # 4 texts

    Args:
        rollouts: 2N rows in that order, with `generated_ids`, `attention_mask` and `response_mask`.

    Raises:
        DataError: an odd number of rows.
    """

    def __init__(self, rollouts: RolloutBatch) -> None:
        if len(rollouts) % 2:
            raise DataError(f"pairs need an even number of rows, chosen and rejected in turn; given {len(rollouts)}")
        self.rollouts = rollouts

    @classmethod
    def from_rows(cls, rows: Sequence[PreferenceRow], pad_token_id: int) -> PreferenceBatch:
        """Pads rows of a `PreferenceSource`: prompts left, answers right; masks come from lengths."""
        twice = [row for row in rows for _ in range(2)]
        answers = [ids for row in rows for ids in (row.chosen_ids, row.rejected_ids)]
        fields: dict[str, Any] = {
            **DataCollector(pad_token_id).collate([row.prompt_ids for row in twice], answers),
            "prompts": [row.prompt for row in twice],
            "responses": [text for row in rows for text in (row.chosen, row.rejected)],
            "columns": [row.columns for row in twice],
            "rows": torch.tensor([row.index for row in twice]),
            "groups": torch.arange(len(rows)).repeat_interleave(2),
            "preferences": torch.tensor([1.0, -1.0]).repeat(len(rows)),
        }
        return cls(RolloutBatch(fields))

    @classmethod
    def from_rollouts(cls, batch: RolloutBatch, chosen: Tensor, rejected: Tensor) -> PreferenceBatch:
        """Pairs of rollouts that were sampled: rows `chosen` (N,) against rows `rejected` (N,)."""
        return cls(batch.select(torch.stack([chosen, rejected], dim=1).flatten()))

    def __len__(self) -> int:
        return len(self.rollouts) // 2

    @property
    def batch_size(self) -> int:
        """N, the number of pairs."""
        return len(self)

    def chosen(self, name: str) -> Tensor:
        """A column's rows of the chosen responses, (N, ...)."""
        return self.rollouts[name][0::2]  # type: ignore[no-any-return]

    def rejected(self, name: str) -> Tensor:
        """A column's rows of the rejected responses, (N, ...)."""
        return self.rollouts[name][1::2]  # type: ignore[no-any-return]

    def select(self, indices: Tensor | Sequence[int] | slice) -> PreferenceBatch:
        """Pairs by index or slice, in the order given."""
        index = torch.arange(len(self))[indices]
        return PreferenceBatch(self.rollouts.select(torch.stack([2 * index, 2 * index + 1], dim=1).flatten()))

    def trim(self) -> PreferenceBatch:
        """Without the columns that are padding in every row."""
        return PreferenceBatch(self.rollouts.trim())
