"""Proximal policy optimisation with a critic (Schulman et al. 2017; Ouyang et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reference import ReferenceController
from rlkit.dataflow import Dataflow
from rlkit.trainers.estimators import GaeAdvantages
from rlkit.trainers.rollouts import RolloutTrainer


class PPOTrainer(RolloutTrainer):
    """Clipped policy updates with advantages from a critic by GAE.

        trainer = PPOTrainer(
            actor=ActorController(model, tokenizer),
            critic=CriticController(value_model),
            reward_model=RewardController(score),
            config={"batch_size": 32, "ppo_epochs": 4, "lr": 1e-6},
        )
        trainer.step()

    The KL penalty against `reference`, if any, is subtracted from each token's reward unless `kl_placement` says
    otherwise; `policy_loss` names another loss. Arguments and errors as for `RolloutTrainer`; the critic is required.
    """

    algorithm: ClassVar[str] = "ppo"
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        actor: ActorController,
        critic: CriticController,
        reward_model: Any,
        reference: ReferenceController | None = None,
        *,
        prompts: Any = None,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        dataflow: Dataflow | None = None,
    ) -> None:
        super().__init__(
            actor, reward_model, critic=critic, reference=reference, prompts=prompts, config=config, dataflow=dataflow
        )

    def estimator(self) -> Controller:
        """Generalised advantage estimation from the critic's values."""
        return GaeAdvantages(self, self.penalises_reward, self.corrects)
