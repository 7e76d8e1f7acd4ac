"""Rollout batches with every kind of column, for the tests of batches and their collator."""

import torch

from rlkit.batch import DataCollector, RolloutBatch

PAD = 2
COLLECTOR = DataCollector(PAD)


def make_batch(prompts: list[list[int]], responses: list[list[int]]) -> RolloutBatch:
    """Every kind of column: ids, masks, floats per token, text, objects, reward terms."""
    size = len(prompts)
    batch = RolloutBatch(COLLECTOR.collate(prompts, responses))
    return batch.with_fields(
        {
            "prompts": [f"prompt {i}" for i in range(size)],
            "columns": [{"answer": i, "notes": [i, None]} for i in range(size)],
            "values": batch.response_mask * torch.arange(1.0, batch.response_width + 1),
            "reward/length": batch.response_mask.sum(1).float(),
            "rows": torch.arange(size),
        }
    )


def same(one: RolloutBatch, other: RolloutBatch) -> bool:
    return one.names == other.names and all(
        torch.equal(one[n], other[n]) if one.specs[n].is_tensor else one[n] == other[n] for n in one.names
    )


TWO = make_batch([[4, 2, 5], [1]], [[5, 6, 2], [5, 6, 7, 8, 9]])
