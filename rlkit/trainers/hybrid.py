"""Two losses on one actor: PPO or GRPO on sampled responses, DPO on offline pairs, in a ratio that may move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reference import ReferenceController
from rlkit.dataflow import Dataflow
from rlkit.errors import ConfigError
from rlkit.schedules import ramp
from rlkit.trainers.estimators import CriticFreeAdvantages, GaeAdvantages
from rlkit.trainers.grpo import GRPOTrainer, check_groups
from rlkit.trainers.learner import Lesson
from rlkit.trainers.objectives import PreferenceObjective
from rlkit.trainers.preference_part import PreferencePart
from rlkit.trainers.rollouts import RolloutTrainer
from rlkit.trainers.runnable import Stateful


class HybridTrainer(RolloutTrainer):
    """Learns from rewards and from pairs at once: `(1 - ratio) * policy loss + ratio * DPO loss`, in every update.

        trainer = HybridTrainer(
            actor, reward_model=score, preferences=pairs, critic=CriticController(trunk=actor),
            reference=ReferenceController(actor),
            config={"batch_size": 16, "dpo_ratio": 0.9, "dpo_ratio_end": 0.1, "dpo_ratio_steps": 50},
        )

    With a critic the policy loss is PPO's, without one GRPO's. The ratio moves from `dpo_ratio` to `dpo_ratio_end` over
    `dpo_ratio_steps` steps; all three can be changed while a run goes on, and a `dpo_ratio` set alone ends the
    schedule. Arguments and errors as for `RolloutTrainer` and `DPOTrainer`; the reference is required.
    """

    algorithm: ClassVar[str] = "hybrid"
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        actor: ActorController,
        reward_model: Any,
        preferences: Any,
        critic: CriticController | None = None,
        reference: ReferenceController | None = None,
        *,
        prompts: Any = None,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        dataflow: Dataflow | None = None,
    ) -> None:
        if reference is None:
            raise ConfigError("the DPO side compares with a reference: reference=ReferenceController(actor)")
        if critic is None and not isinstance(config, TrainerConfig):
            config = {**GRPOTrainer.defaults, **(config or {})}
        ratio = self.configure(config).dpo_ratio
        dataflow = (dataflow or Dataflow()).copy().connect(reference.output, actor.feedback, weight=ratio)
        super().__init__(
            actor, reward_model, critic=critic, reference=reference, prompts=prompts, config=config, dataflow=dataflow
        )
        self.preferences = PreferencePart(preferences, actor, reference, self.config, self.tracker, alone=False)
        self.preference_objective = PreferenceObjective(self, actor, self.learner.engines["policy"], self.tracker)

    def aspects(self) -> set[str]:
        """Those of both losses and of their ratio."""
        return super().aspects() | {"dpo", "hybrid"}

    def estimator(self) -> Controller:
        """GAE from the critic's values where there is one, else what `advantage_estimator` names."""
        kind = GaeAdvantages if self.critic is not None else CriticFreeAdvantages
        return kind(self, self.penalises_reward, self.corrects)

    def check(self) -> None:
        super().check()
        if self.critic is None:
            check_groups(self.config)

    @property
    def dpo_ratio(self) -> float:
        """Share of the DPO loss in the next step."""
        config = self.config
        return ramp(config.dpo_ratio, config.dpo_ratio_end, self.global_step, config.dpo_ratio_steps)

    def set(self, **changes: Any) -> None:
        """Changes live settings, see `Trainer.set`. A `dpo_ratio` without a `dpo_ratio_end` holds from now on."""
        if "dpo_ratio" in changes:
            changes.setdefault("dpo_ratio_end", None)
        super().set(**changes)

    def parts(self) -> dict[str, Stateful]:
        return {**super().parts(), "preferences": self.preferences}

    def sources(self) -> Sequence[Stateful]:
        return [*super().sources(), self.preferences]

    def gather(self) -> tuple[RolloutBatch, list[Lesson]]:
        batch, lessons = super().gather()
        ratio = self.dpo_ratio
        self.tracker.add("preferences/ratio", ratio)
        pairs = self.preferences.draw(self.config.pairs_per_step or max(self.config.batch_size // 2, 1))
        policy, *others = lessons
        return batch, [replace(policy, share=1 - ratio), Lesson(self.preference_objective, pairs, ratio), *others]
