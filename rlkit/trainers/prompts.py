"""Prompts of a trainer: opened from whatever a user gives, and drawn as the rows of a step."""

from __future__ import annotations

from typing import Any

import torch

from rlkit.batch import RolloutBatch
from rlkit.collate import DataCollector
from rlkit.controllers.actor import ActorController
from rlkit.curriculum import Curriculum, CurriculumSource
from rlkit.data import OPENINGS, PromptSource


def open_prompts(given: Any, actor: ActorController, seed: int, longest: int) -> PromptSource | CurriculumSource:
    """A source of prompts that fit the model's context.

    Args:
        given: as for the trainer; None takes rlkit's own openings.
        actor: its tokenizer reads them.
        seed: of their order.
        longest: tokens that a prompt may have.
    """
    if isinstance(given, Curriculum):
        return given.open(actor.tokenizer, seed, longest)
    prompts = OPENINGS if given is None else given
    return PromptSource(prompts, actor.tokenizer, seed=seed, max_prompt_length=longest)


def draw_prompts(
    source: PromptSource | CurriculumSource, count: int, group_size: int, actor: ActorController
) -> RolloutBatch:
    """The next `count` prompts, each repeated `group_size` times, on the actor's device."""
    rows = source.next(count)
    batch = RolloutBatch(
        {
            **DataCollector(actor.pad_token_id).collate_prompts([row.ids for row in rows]),
            "prompts": [row.text for row in rows],
            "columns": [row.columns for row in rows],
            "rows": torch.tensor([row.index for row in rows]),
            "groups": torch.arange(len(rows)),
        }
    )
    return batch.select(torch.arange(len(rows)).repeat_interleave(group_size)).to(actor.device)
