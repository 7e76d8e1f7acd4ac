"""R06: before the first update the ratio of new to old policy is 1: bit for bit with equal shapes, 1e-5 with others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlkit.trainers.ppo import PPOTrainer
from tests.generation.models import family_model
from tests.trainers.toys import grpo, ppo

FIRST = "train/first_ratio_max_abs_log"


def letters(response: str) -> float:
    """A reward that differs between any two responses, so that every step moves the policy."""
    return len(response) / 10


def dropping() -> Any:
    """A model in training mode with dropout of 0.1 on embeddings, attention and residuals, which does change scores."""
    model = family_model("gpt2").train()
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.1}
    ids = torch.tensor([[5, 6, 7]])
    assert not torch.equal(model(ids).logits, model(ids).logits)
    return model


@pytest.mark.parametrize("build", [ppo, grpo])
def test_r06_equal_shapes_give_exactly_one(build: Any) -> None:
    trainer = build(model=dropping(), reward=letters, ppo_epochs=2)
    assert trainer.step().metrics[FIRST] == 0.0
    metrics = trainer.step().metrics
    assert metrics[FIRST] == 0.0
    assert metrics["train/approx_kl"] != 0.0  # the second epoch has moved
    assert trainer.actor.model.training


def test_r06_an_evaluation_in_between_changes_nothing() -> None:
    trainer = ppo(model=dropping(), reward=letters, ppo_epochs=2)
    for _ in range(2):
        trainer.evaluate()
        assert trainer.step().metrics[FIRST] == 0.0


@pytest.mark.parametrize("sizes", [{"micro_batch_size": 1}, {"micro_batch_size": 4}, {"minibatch_size": 8}])
@pytest.mark.parametrize("build", [ppo, grpo])
def test_r06_other_shapes_give_one_to_1e5(build: Any, sizes: dict[str, int]) -> None:
    trainer = build(model=dropping(), reward=letters, ppo_epochs=2, **sizes)
    assert trainer.step().metrics[FIRST] <= 1e-5
    assert trainer.step().metrics[FIRST] <= 1e-5


def test_r06_a_policy_that_has_moved_is_seen() -> None:
    """The metric is not simply 0: old log-probs of other weights show in it."""
    trainer: PPOTrainer = ppo(reward=letters, ppo_epochs=2)
    trainer.follow_settings()
    batch, lessons = trainer.gather()
    with torch.no_grad():
        for parameter in trainer.actor.model.parameters():
            parameter.mul_(1.1)
    trainer.learner.learn(lessons, 0)
    assert trainer.tracker.flush(0).metrics[FIRST] > 1e-3
    assert batch.batch_size == 16
