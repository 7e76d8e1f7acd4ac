"""An update is made of its own step's gradients alone, whatever stood in the parameters before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlkit.controllers.actor import ActorController
from rlkit.trainers.dpo import DPOTrainer
from tests.tiny import tiny_model, tiny_tokenizer

PAIRS = [
    {"prompt": "the film was", "chosen": "very good", "rejected": "bad"},
    {"prompt": "the day is", "chosen": "good", "rejected": "not so good and bad"},
]


def dpo() -> DPOTrainer:
    return DPOTrainer(
        ActorController(tiny_model(0), tiny_tokenizer()), PAIRS, config={"batch_size": 2, "lr": 1e-3, "threads": 1}
    )


def weights(trainer: DPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.actor.model.parameters()])


def test_gradients_that_a_model_comes_with_are_not_learned_from() -> None:
    fresh, trained_before = dpo(), dpo()
    for parameter in trained_before.actor.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norms = [trainer.step().metrics["train/grad_norm"] for trainer in (fresh, trained_before)]
    assert norms[0] == norms[1]
    assert torch.equal(weights(trained_before), weights(fresh))


def test_a_step_that_was_given_up_while_learning_leaves_no_gradients_behind() -> None:
    fresh, interrupted = dpo(), dpo()
    accumulate = interrupted.objective.accumulate

    def interrupt(*given: Any, **named: Any) -> None:
        accumulate(*given, **named)
        raise KeyboardInterrupt

    state = interrupted.preferences.state_dict()
    interrupted.objective.accumulate = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        interrupted.step()
    interrupted.objective.accumulate = accumulate  # type: ignore[method-assign]
    interrupted.preferences.load_state_dict(state)
    assert interrupted.step().metrics["train/grad_norm"] == fresh.step().metrics["train/grad_norm"]
    assert torch.equal(weights(interrupted), weights(fresh))
