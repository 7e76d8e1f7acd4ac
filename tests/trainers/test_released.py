"""Controllers whose weights a run owns."""

from __future__ import annotations

import copy
import math

import pytest

from rlkit.controllers.actor import ActorController
from rlkit.errors import RunError
from rlkit.trainers import state
from rlkit.trainers.dpo import DPOTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.toys import grpo

PAIRS = [{"prompt": "the film was", "chosen": "very good", "rejected": "bad"}]


def test_an_actor_that_went_to_a_run_is_refused_until_it_is_back() -> None:
    actor = ActorController(tiny_model(0), tiny_tokenizer())
    config = {"batch_size": 1, "threads": 1}
    trainer = DPOTrainer(actor, PAIRS, config=config)
    taken, frozen = copy.deepcopy(trainer.state_dict()), copy.deepcopy(trainer.frozen_state_dict())
    trainer.release("runs/exp")
    with pytest.raises(RunError, match=r"weights of 'actor' went with its trainer to a run; .* run\.load\(\)"):
        DPOTrainer(actor, PAIRS, reference_free=True, config=config)
    trainer.reclaim(taken, frozen)
    again = DPOTrainer(actor, PAIRS, config=config)
    assert again.step().metrics["preferences/loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_what_the_generator_holds_is_given_up_before_caches_are_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, order = grpo(), list[str]()
    monkeypatch.setattr(trainer.actor.generator, "release", lambda: order.append("generator"))
    monkeypatch.setattr(state, "_return_freed_memory", lambda _: order.append("caches"))
    trainer.release("runs/exp")
    assert order == ["generator", "caches"]
