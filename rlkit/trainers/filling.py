"""What a step must hold to be learned from.

Dynamic sampling: sample on until every group of the batch has something to say (DAPO, Yu et al. 2025, 3.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rlkit.algorithms.groups import Groups
from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.errors import DataError

if TYPE_CHECKING:
    from rlkit.trainers.rollouts import RolloutTrainer


def fill(trainer: RolloutTrainer) -> RolloutBatch:
    """B rollouts of groups whose rewards differ, from at most `max_sampling_rounds` rounds of sampling.

    When the rounds are over the batch is whatever was found, and groups without spread where nothing was. What belongs
    to the whole batch (normalised rewards, advantages) is computed for the batch that is learned from.
    """
    config = trainer.config
    wanted, dropped, rounds = config.batch_size, 0, 0
    kept: list[RolloutBatch] = []
    batch: RolloutBatch | None = None
    while sum(part.batch_size for part in kept) < wanted and rounds < config.max_sampling_rounds:
        batch = trainer.pipeline.run(trainer.draw())
        rounds += 1
        useful = spread_rows(batch)
        dropped += int((~useful).sum())
        if bool(useful.any()):
            part = batch.select(useful)
            kept.append(part.with_fields({"groups": part.groups + rounds * config.prompts_per_step}))
    trainer.tracker.add("rollout/sampling_rounds", rounds)
    trainer.tracker.add_sum_count("rollout/resampled_fraction", dropped, rounds * wanted)
    assert batch is not None
    if not kept:
        return batch
    whole = RolloutBatch.cat(kept, trainer.actor.pad_token_id)
    whole = whole.select(slice(0, wanted))
    whole = whole.with_fields(trainer.mixer.run(whole))
    return whole.with_fields(trainer.last.run(whole))


def require_sampled(batch: RolloutBatch, config: TrainerConfig) -> None:
    """Refuses a step of greedy responses alone.

    Raises:
        DataError: no response of the batch was sampled, so that no probability in it can change.
    """
    if bool(batch.drawn_at_random.any()):
        return
    lengths = batch.attention_mask.sum(1)
    raise DataError(
        f"all {batch.batch_size} responses of this step are greedy, and nothing can be learned from a token that is "
        f"always taken: the prompts have {int(lengths.min())} to {int(lengths.max())} tokens, those under "
        f"adaptive_short_prompt={config.adaptive_short_prompt} are sampled at temperature "
        f"{config.adaptive_short_temperature} and those over adaptive_long_prompt={config.adaptive_long_prompt} at "
        f"{config.adaptive_long_temperature}. Lower adaptive_short_prompt, or set adaptive_short_temperature above 0"
    )


def spread_rows(batch: RolloutBatch) -> Tensor:
    """(B,) bool: rollouts of groups in which two valid rewards differ."""
    groups = Groups.of(batch.rewards, batch.groups, batch.reward_valid)
    return groups.spread[groups.group]
