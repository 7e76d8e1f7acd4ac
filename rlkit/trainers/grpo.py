"""Policy optimisation without a critic: GRPO (Shao et al. 2024) and the estimators that take its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller
from rlkit.controllers.reference import ReferenceController
from rlkit.dataflow import Dataflow
from rlkit.errors import ConfigError
from rlkit.trainers.estimators import CriticFreeAdvantages
from rlkit.trainers.rollouts import RolloutTrainer

_NEED_GROUPS = ("grpo", "rloo", "reinforce++-baseline", "gpg", "pass@k", "gdpo")


class GRPOTrainer(RolloutTrainer):
    """Clipped policy updates with advantages from the other responses to the same prompt; no critic.

        trainer = GRPOTrainer(
            actor=ActorController(model, tokenizer),
            reward_model=score,
            config={"batch_size": 16, "group_size": 4, "lr": 2e-5},
        )
        trainer.step()

    Other algorithms without a critic are settings: `advantage_estimator` names the estimator, `policy_loss` the loss,
    and `rlkit.presets` holds the settings of published ones (`config={**presets.RLOO, "batch_size": 64}`). The KL
    penalty against `reference`, if any, is added to the loss unless `kl_placement` says otherwise. Arguments and errors
    as for `RolloutTrainer`.
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

    def estimator(self) -> Controller:
        """What `advantage_estimator` names."""
        return CriticFreeAdvantages(self, self.penalises_reward, self.corrects)

    def check(self) -> None:
        super().check()
        check_groups(self.config)


def check_groups(config: TrainerConfig) -> None:
    """Refuses groups and terms that an estimator without a critic cannot learn from."""
    estimator = config.advantage_estimator
    if config.group_size < 2 and estimator in _NEED_GROUPS:
        raise ConfigError(
            f"group_size={config.group_size}: {estimator} compares the responses to one prompt with each other, so a "
            "group of one always has advantage 0 and never learns; set group_size to 2 or more"
        )
    if estimator == "gdpo" and (
        config.kl_placement != "loss" or set((config.reward_normalization or {}).values()) != {"group"}
    ):
        raise ConfigError(
            "advantage_estimator='gdpo' normalises every reward term within its group before they are mixed: set "
            "reward_normalization={'*': 'group'}, and kl_placement='loss'"
        )
