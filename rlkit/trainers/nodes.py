"""The controllers a trainer adds to a dataflow before advantages: mixing terms, scoring the policy, correcting it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from rlkit.algorithms.correction import rollout_correction
from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller
from rlkit.controllers.parts import in_parts
from rlkit.controllers.reward import RewardController
from rlkit.engines.attention import packs
from rlkit.fields import SAMPLED_FIELDS
from rlkit.generation.base import SamplingParams
from rlkit.metrics import MetricsTracker
from rlkit.rewards import RewardWeights, mix
from rlkit.rewards.weights import Normalization


class HasConfig(Protocol):
    """Whatever holds the settings in force; nodes read them anew at every step."""

    config: TrainerConfig


class RewardMix(Controller):
    """Mixes the raw terms into `rewards` (B,) with the live weights. Raw terms stay in the batch as they are.

    Args:
        terms: names of the terms.
        weights: the weights in force.
        normalization: "none", "batch" or "group" for each term; see `rlkit.rewards.mix`.
    """

    role = "mixer"
    heavy = False
    writes = ("rewards", "reward_valid")

    def __init__(
        self, terms: Sequence[str], weights: RewardWeights, normalization: Mapping[str, Normalization]
    ) -> None:
        super().__init__("reward_mix")
        self.terms = tuple(terms)
        self.weights = weights
        self.normalization = dict(normalization)
        self.reads = (*(f"reward/{term}" for term in self.terms), "groups")

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        terms = {term: batch[f"reward/{term}"] for term in self.terms}
        rewards, valid = mix(terms, self.weights.current, normalization=self.normalization, groups=batch.groups)
        return {"rewards": rewards, "reward_valid": valid}


class PolicyScores(Controller):
    """Log-probs (B,T) of the responses under the trainer's own forward, before the update."""

    role = "scorer"
    reads = ("generated_ids", "attention_mask", "response_mask", *SAMPLED_FIELDS)
    writes = ("logprobs",)

    def __init__(self, actor: ActorController, live: HasConfig) -> None:
        super().__init__("policy_scores")
        self.actor = actor
        self.live = live

    @property
    def device(self) -> str:
        """The actor's device."""
        return self.actor.device

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        with torch.no_grad():
            packed = packs(self.actor.model)
            return in_parts(self.actor.scoring, batch, packed, self._score, batch.drawn_at_random)

    def _score(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        return {"logprobs": self.actor.scores(batch, batch.sampled(self.live.config.temperature)).logprobs}


class RolloutCorrection(Controller):
    """Weights and rejections (B,T) where the trainer's policy gives other probabilities than the sampler's."""

    role = "correction"
    heavy = False
    reads = ("logprobs", "rollout_logprobs", "response_mask")
    writes = ("correction_weights", "correction_mask")

    def __init__(self, live: HasConfig, tracker: MetricsTracker) -> None:
        super().__init__("rollout_correction")
        self.live, self.tracker = live, tracker

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        config = self.live.config
        floor, threshold, band = config.correction_floor, config.correction_threshold, config.rejection_band
        rejects, by_band = config.rejection != "none", config.rejection_kind == "k1"
        correction = rollout_correction(
            batch.logprobs,
            batch.rollout_logprobs,
            batch.response_mask,
            weights=config.correction_weights,
            threshold=threshold,
            icepop=None if floor is None else (floor, threshold),
            normalise=config.correction_normalise,
            rejection=config.rejection,
            rejection_kind=config.rejection_kind,
            rejection_band=(1 / band, band) if rejects and by_band else None,
            rejection_limit=config.rejection_limit if rejects and not by_band else None,
        )
        for name, (total, count) in correction.metrics.items():
            self.tracker.add_sum_count(f"correction/{name}", total, count)
        return {"correction_weights": correction.weights, "correction_mask": correction.mask}


class GreedyBaseline(Controller):
    """Reward (B,) of the greedy response to each prompt, which ReMax compares the sampled one with.

    Args:
        actor: samples the greedy responses; once for each prompt, however many responses were sampled.
        rewards: the terms that score them.
        mixer: mixes the terms as it does those of the rollouts.
        live: holder of the sampling settings.
    """

    role = "baseline"
    reads = ("input_ids", "attention_mask", "prompts", "columns", "groups", "generated_ids")
    writes = ("reward_baselines",)

    def __init__(
        self, actor: ActorController, rewards: Sequence[RewardController], mixer: RewardMix, live: HasConfig
    ) -> None:
        super().__init__("greedy_baseline")
        self.actor, self.rewards, self.mixer, self.live = actor, list(rewards), mixer, live

    @property
    def device(self) -> str:
        """The actor's device."""
        return self.actor.device

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        _, row_of = torch.unique(batch.groups, return_inverse=True)
        first = torch.full((int(row_of.max()) + 1,), len(batch), device=row_of.device)
        first = first.scatter_reduce(0, row_of, torch.arange(len(batch), device=row_of.device), "amin")
        prompts = batch.select(first)
        names = ("input_ids", "attention_mask", "prompts", "columns", "groups")
        greedy = RolloutBatch({name: prompts[name] for name in names})
        greedy = greedy.with_fields(self.actor.sample_apart(greedy, self._sampling()))
        for reward in self.rewards:
            greedy = greedy.with_fields(reward.run(greedy))
        return {"reward_baselines": self.mixer.run(greedy)["rewards"][row_of]}

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.live.config.max_new_tokens, temperature=0.0, stop_token_ids=self.actor.stop_token_ids
        )
