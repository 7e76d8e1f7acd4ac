"""A trainer from names: the controllers are built for you."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reference import ReferenceController
from rlkit.trainers.ppo import PPOTrainer


class RLTrainer(PPOTrainer):
    """PPO with controllers built from names.

        trainer = RLTrainer(config=config, actor_model="HuggingFaceTB/SmolLM2-135M-Instruct", reward_model=score)
        trainer.train(steps=10)

    Args:
        actor_model: hub id, local path or module of the policy.
        reward_model: as for `Trainer`: a name, a model, a callable, or several of them.
        critic_model: hub id, local path or module of the critic; None puts a value head on the actor's trunk.
        reference_model: hub id, local path or module of the reference; None takes a frozen copy of the actor where the
            configuration asks for a KL penalty, and none otherwise.
        prompts: as for `Trainer`.
        config: as for `Trainer`.
        use_vllm: whether vLLM samples, as `TrainerConfig.use_vllm`; None leaves it to the configuration.
        **from_pretrained: passed on when the actor is loaded by name (`dtype`, `trust_remote_code`,
            `offload_folder`, ...).
    """

    algorithm: ClassVar[str] = "ppo"

    def __init__(
        self,
        *,
        actor_model: Any,
        reward_model: Any,
        critic_model: Any = None,
        reference_model: Any = None,
        prompts: Any = None,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        use_vllm: bool | None = None,
        **from_pretrained: Any,
    ) -> None:
        settings = self.configure(config)
        if use_vllm is not None:
            decided = settings.generation or (None if settings.use_vllm is None else settings.generation_engine)
            settings = dataclasses.replace(settings, use_vllm=use_vllm, generation=decided)
        actor = ActorController(actor_model, **from_pretrained)
        critic = CriticController(critic_model, new_head=True) if critic_model else CriticController(trunk=actor)
        reference = None
        if reference_model is not None:
            reference = ReferenceController(reference_model)
        elif settings.kl_coef:
            reference = ReferenceController(actor)
        super().__init__(actor, critic, reward_model, reference, prompts=prompts, config=settings)
