"""Direct preference optimisation on offline pairs (Rafailov et al. 2023, arXiv:2305.18290), and its kin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.hosted import HostedController
from rlkit.controllers.parts import load_of
from rlkit.controllers.reference import ReferenceController
from rlkit.data.pairs import PreferenceBatch
from rlkit.errors import ConfigError
from rlkit.trainers.base import Trainer, new_learner
from rlkit.trainers.learner import Lesson
from rlkit.trainers.measure import pair_table
from rlkit.trainers.objectives import PreferenceObjective
from rlkit.trainers.preference_part import PreferencePart
from rlkit.trainers.runnable import Stateful


class DPOTrainer(Trainer):
    """Learns which of two answers is better, from pairs.

        trainer = DPOTrainer(
            actor=ActorController(model, tokenizer),
            preferences=[{"prompt": "The film was", "chosen": " a joy.", "rejected": " a bore."}, ...],
            config={"batch_size": 16, "beta": 0.1, "lr": 5e-6},
        )
        trainer.step()

    `batch_size` is the pairs of a step. `preference_loss` takes DPO's sigmoid, IPO or the hinge; `label_smoothing`,
    `average_logprobs` and `beta` belong to them.

    Args:
        actor: the policy to train.
        preferences: pairs of texts or of chats, see `rlkit.data.preferences.PreferenceSource`.
        reference: the policy that holds the actor near it; None takes a frozen copy of the actor (or the actor's base
            model, where it trains an adapter).
        reference_free: compare with no reference at all.
        config: a TrainerConfig, or a dictionary of its fields.

    Raises:
        ConfigError: an unknown key (the nearest name is suggested), a value out of range, or settings that do not fit.
        DataError: pairs that cannot be read, or one that does not fit the model's context.
        ModelError: the reference reads other tokens than the actor.
    """

    algorithm: ClassVar[str] = "dpo"
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        actor: ActorController,
        preferences: Any,
        reference: ReferenceController | None = None,
        *,
        reference_free: bool = False,
        config: TrainerConfig | Mapping[str, Any] | None = None,
    ) -> None:
        if reference_free and reference is not None:
            raise ConfigError("reference_free compares with no reference, but one was given; leave one of them out")
        if reference is None and not reference_free:
            reference = ReferenceController(actor)
        super().__init__(actor, reference=reference, config=config)
        self.place()
        actor.learns_from = ("preferences",)
        self.preferences = PreferencePart(preferences, actor, reference, self.config, self.tracker, alone=True)
        self.dataflow = self.preferences.dataflow
        self.learner = new_learner(self)
        self.objective = PreferenceObjective(self, actor, self.learner.engines["policy"], self.tracker)

    def check(self) -> None:
        self.check_settings(self.config)

    def check_settings(self, config: TrainerConfig) -> None:
        if config.kl_coef:
            raise ConfigError("kl_coef has no place in DPO: beta holds the policy near the reference; set kl_coef to 0")

    def hosted(self) -> list[HostedController]:
        return [self.actor, *([] if self.reference is None else [self.reference])]

    def parts(self) -> dict[str, Stateful]:
        return {"preferences": self.preferences, "learner": self.learner}

    def sources(self) -> Sequence[Stateful]:
        return [self.preferences]

    def setting_specs(self) -> dict[str, dict[str, Any]]:
        """For each live setting its type, bounds and description."""
        return TrainerConfig.live_specs(self.aspects())

    def aspects(self) -> set[str]:
        return {"dpo"}

    def gather(self) -> tuple[RolloutBatch, list[Lesson]]:
        pairs = self.preferences.draw(self.config.batch_size)
        return pairs.rollouts, [Lesson(self.objective, pairs)]

    def measure(self, batch: RolloutBatch) -> None:
        self.tracker.add("preferences/epoch", self.preferences.source.epoch)
        self.tracker.add_sum_count("preferences/tokens", batch.response_lengths.sum(), 1)

    def table(self, batch: RolloutBatch) -> dict[str, list[Any]]:
        return pair_table(PreferenceBatch(batch))

    def evaluate(self, preferences: Any = None, *, count: int | None = None) -> dict[str, float]:
        """Metrics of the loss (accuracy, margin, ...) without learning; leaves data and weights as they were.

        Args:
            preferences: other pairs; None takes the trainer's own, from where they stand.
            count: pairs to take; None takes `batch_size`, or all of other pairs.
        """
        self.require_own_state()
        self.follow_settings()
        source = self.preferences.source if preferences is None else self.preferences.read(preferences, self.config)
        before = source.state_dict()
        if count is None:
            count = self.config.batch_size if preferences is None else len(source)
        try:
            with torch.no_grad():
                pairs = self.preferences.draw(count, source)
                weights = self.objective.weights(pairs)
                for rows in self.learner.budget.parts(load_of(pairs), self.objective.packed):
                    self.objective.accumulate(pairs.select(rows), weights[rows], 1.0, first=False)
            return self.tracker.flush(self.global_step).metrics
        finally:
            source.load_state_dict(before)
