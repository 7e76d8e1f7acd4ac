"""Every algorithm learns a toy task from scratch, on each of three seeds, and unlearns it when its loss is negated.

The task is to say "good": the score is the share of that word among the six tokens of a response, 1/48 at the start.
A score is that of 64 responses sampled after the last step. Those that learn from their own responses all but finish
the task (0.75 to 1.0); DPO only sees that "good" is better than any other word, and learns to order pairs rather than
what to say (0.2 to 0.6). Negated, each ends where it began or below.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from rlkit import presets
from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reference import ReferenceController
from rlkit.engines.train import TrainEngine
from rlkit.trainers.base import Trainer
from rlkit.trainers.dpo import DPOTrainer
from rlkit.trainers.hybrid import HybridTrainer
from rlkit.trainers.online_dpo import OnlineDPOTrainer
from tests.tiny import WORDS, tiny_model, tiny_tokenizer
from tests.trainers.toys import PROMPTS, good, grpo, ppo

FAST = {"batch_size": 32, "max_new_tokens": 6, "lr": 1e-2, "threads": 1}


def pairs(seed: int) -> list[dict[str, str]]:
    """256 pairs: an answer of five random words, and a better one in which three of them are "good"."""
    rng = random.Random(seed)
    vocabulary = [*WORDS[1:], *(f"w{i}" for i in range(16))]
    rows = []
    for _ in range(256):
        worse = rng.choices(vocabulary, k=5)
        better = list(worse)
        for place in rng.sample(range(5), 3):
            better[place] = "good"
        rows.append(
            {"prompt": rng.choice(PROMPTS), "chosen": " " + " ".join(better), "rejected": " " + " ".join(worse)}
        )
    return rows


def dpo(seed: int, model: Any) -> DPOTrainer:
    actor = ActorController(model, tiny_tokenizer())
    config = {**FAST, "beta": 0.1, "lr_schedule": "linear", "total_steps": 20, "seed": seed}
    return DPOTrainer(actor, pairs(seed), config=config)


def online_dpo(seed: int, model: Any) -> Trainer:
    actor = ActorController(model, tiny_tokenizer())
    config = {**FAST, "group_size": 4, "beta": 0.1, "seed": seed}
    return OnlineDPOTrainer(actor, good, ReferenceController(actor), prompts=PROMPTS, config=config)


def hybrid(seed: int, model: Any, critic: bool) -> Trainer:
    actor = ActorController(model, tiny_tokenizer())
    critics = (CriticController(trunk=actor),) if critic else (None,)
    config = {**FAST, "dpo_ratio": 0.5, "dpo_ratio_end": 0.1, "dpo_ratio_steps": 10, "seed": seed}
    return HybridTrainer(actor, good, pairs(seed), *critics, ReferenceController(actor), prompts=PROMPTS, config=config)


ALGORITHMS: dict[str, tuple[Callable[[int, Any], Trainer], int, float]] = {
    # builder, steps, score to reach
    "ppo": (lambda seed, model: ppo(model=model, seed=seed, **FAST), 20, 0.6),
    "ppo with its own critic": (lambda seed, model: ppo(model=model, trunk=False, seed=seed, **FAST), 20, 0.6),
    "grpo": (lambda seed, model: grpo(model=model, seed=seed, **FAST), 20, 0.6),
    "rloo": (lambda seed, model: grpo(model=model, seed=seed, **{**presets.RLOO, **FAST}), 20, 0.6),
    "reinforce++": (lambda seed, model: grpo(model=model, seed=seed, **{**presets.REINFORCE_PP, **FAST}), 20, 0.6),
    "dpo": (dpo, 20, 0.12),
    "online dpo": (online_dpo, 20, 0.6),
    "hybrid of ppo and dpo": (lambda seed, model: hybrid(seed, model, critic=True), 20, 0.6),
    "hybrid of grpo and dpo": (lambda seed, model: hybrid(seed, model, critic=False), 20, 0.6),
}
START = 0.06
"""Above what 64 responses of a fresh model score."""


def score(model: Any) -> float:
    """Mean score of 64 responses sampled from the model."""
    rollouts = grpo(model=model, batch_size=64, seed=1234).evaluate(PROMPTS, count=16)
    return float(rollouts.rewards.mean())


def train(name: str, seed: int) -> float:
    """The score after training a fresh model."""
    build, steps, _ = ALGORITHMS[name]
    model = tiny_model(seed)
    trainer = build(seed, model)
    for _ in range(steps):
        trainer.step()
    return score(model)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_learns_the_toy_task(name: str, seed: int) -> None:
    assert score(tiny_model(seed)) < START
    assert train(name, seed) > ALGORITHMS[name][2]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_unlearns_the_toy_task_with_its_loss_negated(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = TrainEngine.backward
    monkeypatch.setattr(TrainEngine, "backward", lambda engine, loss: backward(engine, -loss))
    assert train(name, seed) < START


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("sign", [1, -1])
def test_dpo_orders_pairs_that_it_has_not_seen(sign: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The score is the share of 256 other pairs whose better answer has gained on the reference; negated, few."""
    backward = TrainEngine.backward
    monkeypatch.setattr(TrainEngine, "backward", lambda engine, loss: backward(engine, sign * loss))
    trainer = dpo(seed, tiny_model(seed))
    for _ in range(20):
        trainer.step()
    accuracy = trainer.evaluate(pairs(99))["preferences/accuracy"]
    assert accuracy > 0.95 if sign > 0 else accuracy < 0.05
