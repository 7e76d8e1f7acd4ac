"""Group-relative policy optimisation (Shao et al. 2024) and its centred form, Dr. GRPO (Liu et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller
from rlkit.controllers.reference import ReferenceController
from rlkit.dataflow import Dataflow
from rlkit.errors import ConfigError
from rlkit.trainers.base import Trainer
from rlkit.trainers.nodes import GroupAdvantages


class GRPOTrainer(Trainer):
    """Clipped policy updates with advantages from the other responses to the same prompt; no critic.

        trainer = GRPOTrainer(
            actor=ActorController(model, tokenizer),
            reward_model=score,
            config={"batch_size": 16, "group_size": 4, "lr": 2e-5},
        )
        trainer.step()

    `scale_by_std=False` with `loss_aggregation="seq-mean-token-sum-norm"` gives Dr. GRPO. The KL penalty against
    `reference`, if any, is added to the loss unless `kl_placement` says otherwise. Arguments and errors as for
    `Trainer`.
    """

    algorithm: ClassVar[str] = "grpo"
    defaults: ClassVar[Mapping[str, Any]] = {"group_size": 4, "kl_placement": "loss", "kl_estimator": "k3+"}

    def __init__(
        self,
        actor: ActorController,
        reward_model: Any,
        reference: ReferenceController | None = None,
        *,
        prompts: Any = None,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        dataflow: Dataflow | None = None,
    ) -> None:
        super().__init__(actor, reward_model, reference=reference, prompts=prompts, config=config, dataflow=dataflow)

    def advantages(self) -> Controller:
        """Rewards against those of the other responses to the same prompt."""
        return GroupAdvantages(self, self.penalises_reward)

    def _check(self) -> None:
        super()._check()
        if self.config.group_size < 2:
            raise ConfigError(
                f"group_size={self.config.group_size}: GRPO compares the responses to one prompt with each other, so a "
                "group of one always has advantage 0 and never learns; set group_size to 2 or more"
            )
