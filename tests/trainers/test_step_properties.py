"""Gradient and metrics of one update do not depend on micro-batches, row order or padding, whatever the loss."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, get_args

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.batch import RolloutBatch
from rlkit.config import PolicyLoss
from rlkit.controllers.actor import ActorController
from rlkit.controllers.reference import ReferenceController
from rlkit.data.pairs import PreferenceBatch
from rlkit.trainers.base import Trainer
from rlkit.trainers.dpo import DPOTrainer
from rlkit.trainers.learner import Lesson
from rlkit.trainers.ppo import PPOTrainer
from tests.batches import COLLECTOR
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.gradients import distance, watch
from tests.trainers.toys import ppo

FEW = settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
VARIATIONS = st.tuples(
    st.lists(st.integers(1, 5), min_size=4, max_size=6),  # tokens of each response
    st.integers(0, 2**16),  # seed of everything random in the batch
    st.integers(1, 4),  # rows (or pairs) of a micro-batch
    st.randoms(use_true_random=False),  # order of the rows
    st.integers(0, 4),  # wider on the left
    st.integers(0, 4),  # and on the right
)
TIMES = ("time", "latency", "memory", "throughput")


def tokens(lengths: list[int], seed: int) -> RolloutBatch:
    """Rollouts of these lengths with everything that any policy loss reads."""
    rng = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, 48, (1 + row % 3,), generator=rng).tolist() for row in range(len(lengths))]
    answers = [torch.randint(3, 48, (length,), generator=rng).tolist() for length in lengths]
    fields: dict[str, Any] = COLLECTOR.collate(prompts, answers)
    mask = fields["response_mask"]
    for name in ("logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "values", "returns"):
        fields[name] = (torch.randn(mask.shape, generator=rng) / 3 - (3.9 if "logprobs" in name else 0)) * mask
    return RolloutBatch({**fields, "learn_mask": mask})


def update(trainer: Trainer, lesson: Lesson, micro_batch_size: int | None) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of one update that moves nothing (the learning rate is 0)."""
    trainer.config = dataclasses.replace(trainer.config, micro_batch_size=micro_batch_size)
    trainer.learner = type(trainer.learner)(trainer, trainer.engines(), trainer.tracker)
    updates = watch(trainer)
    if isinstance(trainer, PPOTrainer):
        lesson = dataclasses.replace(lesson, objective=trainer.policy_objective())
    elif isinstance(trainer, DPOTrainer):
        trainer.objective.engine = trainer.learner.engines["policy"]
    trainer.learner.learn([lesson], 0)
    metrics = trainer.tracker.flush(0).metrics
    return updates.gradients[0], {n: v for n, v in metrics.items() if not any(word in n for word in TIMES)}


def same(varied: tuple[Tensor, dict[str, float]], plain: tuple[Tensor, dict[str, float]]) -> None:
    assert plain[0].norm() > 1e-3
    assert distance(varied[0], plain[0]) < 1e-5
    assert varied[1] == pytest.approx(plain[1], rel=1e-4, abs=1e-6)


@cache
def policy_trainer(loss: str) -> PPOTrainer:
    """PPO with every term on: KL and entropy in the loss, and the value loss of a critic on the trunk."""
    trainer = ppo(
        model=tiny_model(initializer_range=0.1),
        reference=True,
        policy_loss=loss,
        loss_aggregation="seq-mean-token-mean" if loss in ("gmpo", "gspo") else "token-mean",
        kl_coef=0.1,
        kl_placement="loss",
        kl_estimator="k3",
        entropy_coef=0.05,
        lr=0.0,
    )
    assert trainer.critic is not None
    torch.manual_seed(0)
    torch.nn.init.normal_(trainer.critic.head.linear.weight, std=0.1)
    return trainer


@pytest.mark.parametrize("loss", get_args(PolicyLoss))
@FEW
@given(variation=VARIATIONS)
def test_policy_losses(loss: str, variation: Any) -> None:
    lengths, seed, size, random, left, right = variation
    trainer = policy_trainer(loss)
    batch = tokens(lengths, seed).to(trainer.actor.device)
    order = list(range(len(lengths)))
    random.shuffle(order)
    wide = COLLECTOR.pad(batch.select(order), batch.prompt_width + left, batch.response_width + right)
    plain = update(trainer, Lesson(trainer.policy_objective(), batch), None)
    same(update(trainer, Lesson(trainer.policy_objective(), wide), size), plain)


@cache
def preference_trainer(loss: str, average: bool | None) -> DPOTrainer:
    actor = ActorController(tiny_model(initializer_range=0.1), tiny_tokenizer())
    pair = {"prompt": "the film was", "chosen": " good", "rejected": " bad"}
    config = {"preference_loss": loss, "average_logprobs": average, "beta": 0.5, "lr": 0.0, "batch_size": 1}
    return DPOTrainer(actor, [pair], ReferenceController(actor), config=config)


@pytest.mark.parametrize(("loss", "average"), [("sigmoid", None), ("sigmoid", True), ("ipo", None), ("hinge", None)])
@FEW
@given(variation=VARIATIONS)
def test_preference_losses(loss: str, average: bool | None, variation: Any) -> None:
    lengths, seed, size, random, left, right = variation
    answers = [length for n in lengths for length in (n, 1 + (n + seed) % 5)]
    trainer = preference_trainer(loss, average)
    rollouts = tokens(answers, seed).to(trainer.actor.device)
    pairs = PreferenceBatch(rollouts)
    order = list(range(len(pairs)))
    random.shuffle(order)
    wide = COLLECTOR.pad(pairs.select(order).rollouts, rollouts.prompt_width + left, rollouts.response_width + right)
    plain = update(trainer, Lesson(trainer.objective, pairs), None)
    same(update(trainer, Lesson(trainer.objective, PreferenceBatch(wide)), size), plain)
