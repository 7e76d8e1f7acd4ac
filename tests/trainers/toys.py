"""Toy trainers that take milliseconds a step."""

from __future__ import annotations

from typing import Any

from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reference import ReferenceController
from rlkit.trainers.grpo import GRPOTrainer
from rlkit.trainers.ppo import PPOTrainer
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = ["the film was", "the day is", "food was a", "it is not so"]
CONFIG = {"batch_size": 16, "max_new_tokens": 6, "lr": 3e-3, "threads": 1}


def good(responses: list[str]) -> list[float]:
    """Share of the word "good" in a response of six words."""
    return [response.split().count("good") / 6 for response in responses]


def short(response: str) -> float:
    """Fewer words are better."""
    return -len(response.split()) / 6


def ppo(
    *, reward: Any = good, trunk: bool = True, reference: bool = False, model: Any = None, **config: Any
) -> PPOTrainer:
    """A PPO trainer on a tiny model."""
    actor = ActorController(model or tiny_model(), tiny_tokenizer())
    critic = CriticController(trunk=actor) if trunk else CriticController(tiny_model(1))
    ref = ReferenceController(actor) if reference else None
    return PPOTrainer(actor, critic, reward, ref, prompts=PROMPTS, config={**CONFIG, **config})


def grpo(*, reward: Any = good, reference: bool = False, model: Any = None, **config: Any) -> GRPOTrainer:
    """A GRPO trainer on a tiny model."""
    actor = ActorController(model or tiny_model(), tiny_tokenizer())
    ref = ReferenceController(actor) if reference else None
    return GRPOTrainer(actor, reward, ref, prompts=PROMPTS, config={**CONFIG, **config})
