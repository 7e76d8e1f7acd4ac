"""Online DPO: pairs are the best and the worst response of a group (Guo et al. 2024, arXiv:2402.04792)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller
from rlkit.controllers.reference import ReferenceController
from rlkit.data.pairs import PreferenceBatch
from rlkit.dataflow import Dataflow
from rlkit.errors import ConfigError
from rlkit.trainers.estimators import GroupPreferences
from rlkit.trainers.learner import Lesson
from rlkit.trainers.objectives import PreferenceObjective
from rlkit.trainers.rollouts import RolloutTrainer


class OnlineDPOTrainer(RolloutTrainer):
    """DPO on pairs that the policy samples itself and the rewards choose.

        trainer = OnlineDPOTrainer(actor, reward_model=score, reference=ReferenceController(actor),
                                   config={"batch_size": 32, "group_size": 4, "beta": 0.1, "lr": 5e-6})

    Of each group the response with the highest and the one with the lowest reward become a pair; groups whose rewards
    are all the same give none. Arguments and errors as for `RolloutTrainer`; the reference is required.
    """

    algorithm: ClassVar[str] = "online_dpo"
    defaults: ClassVar[Mapping[str, Any]] = {"group_size": 2}
    actor_learns_from: ClassVar[tuple[str, ...]] = ("preferences",)

    def __init__(
        self,
        actor: ActorController,
        reward_model: Any,
        reference: ReferenceController,
        *,
        prompts: Any = None,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        dataflow: Dataflow | None = None,
    ) -> None:
        super().__init__(actor, reward_model, reference=reference, prompts=prompts, config=config, dataflow=dataflow)

    def aspects(self) -> set[str]:
        """Those of DPO and of sampling."""
        return {"dpo"} | (super().aspects() & {"sampling", "adaptive sampling"})

    def estimator(self) -> Controller:
        """The best and the worst response of each group."""
        return GroupPreferences(self)

    @property
    def penalises_reward(self) -> bool:
        """Never: the loss itself holds the policy near the reference."""
        return False

    @property
    def needs_policy_scores(self) -> bool:
        """Never: the loss compares with the reference, not with the policy before the update."""
        return False

    @property
    def corrects(self) -> bool:
        """Never: pairs may come from any policy."""
        return False

    def lessons(self, batch: RolloutBatch) -> list[Lesson]:
        """The pairs among the rollouts; none where no group has spread."""
        chosen, rejected = ((batch.preferences == side).nonzero().squeeze(1) for side in (1, -1))
        self.tracker.add("preferences/pairs", len(chosen))
        if not len(chosen):
            return []
        pairs = PreferenceBatch.from_rollouts(
            batch, chosen[batch.groups[chosen].argsort()], rejected[batch.groups[rejected].argsort()]
        )
        return [Lesson(PreferenceObjective(self, self.actor, self.learner.engines["policy"], self.tracker), pairs)]

    def check_settings(self, config: TrainerConfig) -> None:
        if config.kl_coef:
            raise ConfigError("kl_coef has no place in DPO: beta holds the policy near the reference; set kl_coef to 0")

    def check(self) -> None:
        super().check()
        if self.reference is None:
            raise ConfigError("online DPO compares with a reference: reference=ReferenceController(actor)")
        if self.config.group_size < 2:
            raise ConfigError("a pair needs two responses to one prompt: set group_size to 2 or more")
