"""The controllers a trainer adds to a dataflow: mixing reward terms, scoring the policy, estimating advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rlkit.algorithms.advantages import gae, group_advantages, place_rewards
from rlkit.algorithms.kl import kl_estimate
from rlkit.algorithms.masked import masked_whiten
from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller
from rlkit.fields import Field
from rlkit.rewards import RewardWeights, mix

REWARD_VALID = Field("reward_valid", ("B",), "bool", "false where every reward term abstained: not learned from")


class HasConfig(Protocol):
    """Whatever holds the settings in force; nodes read them anew at every step."""

    config: TrainerConfig


class RewardMix(Controller):
    """Mixes the raw terms into `rewards` (B,) with the live weights. Raw terms stay in the batch as they are."""

    role = "mixer"
    heavy = False

    def __init__(self, terms: Sequence[str], weights: RewardWeights) -> None:
        super().__init__("reward_mix")
        self.terms = tuple(terms)
        self.weights = weights
        self.reads = tuple(f"reward/{term}" for term in self.terms)
        self.writes = ("rewards", REWARD_VALID)

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        rewards, valid = mix({term: batch[f"reward/{term}"] for term in self.terms}, self.weights.current)
        return {"rewards": rewards, "reward_valid": valid}


class PolicyScores(Controller):
    """Log-probs (B,T) of the responses under the trainer's own forward, before the update."""

    role = "scorer"
    reads = ("generated_ids", "attention_mask", "response_mask")
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
            return {"logprobs": self.actor.scores(batch, self.live.config.temperature).logprobs}


class _Rewarded(Controller):
    """What both estimators share: the reward on a response's last token, and the KL penalty on every token.

    Args:
        live: holder of `kl_coef`, `kl_estimator` and what else the estimator reads.
        penalised: whether the KL penalty is part of the reward, measured by `logprobs` and `ref_logprobs`.
    """

    role = "advantage"
    heavy = False

    def __init__(self, live: HasConfig, penalised: bool) -> None:
        super().__init__("advantages")
        self.live = live
        self.penalised = penalised
        self.reads = ("rewards", REWARD_VALID.name, "response_mask")
        if penalised:
            self.reads += ("logprobs", "ref_logprobs")

    def token_rewards(self, batch: RolloutBatch) -> Tensor:
        """(B,T) rewards after the penalty was placed."""
        config = self.live.config
        kl = None
        if self.penalised and config.kl_coef:
            kl = kl_estimate(batch.logprobs, batch.ref_logprobs, config.kl_estimator)
        return place_rewards(batch.rewards, batch.response_mask, kl, config.kl_coef)


class GaeAdvantages(_Rewarded):
    """PPO's advantages and returns (B,T) by generalised advantage estimation."""

    writes = ("token_rewards", "advantages", "returns")

    def __init__(self, live: HasConfig, penalised: bool) -> None:
        super().__init__(live, penalised)
        self.reads += ("values",)

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        config = self.live.config
        token_rewards = self.token_rewards(batch)
        mask = batch.response_mask
        advantages, returns = gae(token_rewards, batch.values, mask, config.gamma, config.lam)
        learned = loss_mask(batch)
        if config.whiten_advantages and int(learned.sum()) > 1:
            advantages = masked_whiten(advantages, learned)
        return {"token_rewards": token_rewards, "advantages": advantages * learned, "returns": returns * mask}


class GroupAdvantages(_Rewarded):
    """GRPO's advantages (B,T): a response's reward against its group's mean (and standard deviation)."""

    writes = ("token_rewards", "advantages")

    def __init__(self, live: HasConfig, penalised: bool) -> None:
        super().__init__(live, penalised)
        self.reads += ("groups",)

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        token_rewards = self.token_rewards(batch)
        advantages = group_advantages(
            token_rewards.sum(1),
            batch.groups,
            scale_by_std=self.live.config.scale_by_std,
            valid=batch.reward_valid,
        )
        return {"token_rewards": token_rewards, "advantages": advantages.unsqueeze(1) * loss_mask(batch)}


def loss_mask(batch: RolloutBatch) -> Tensor:
    """(B,T) bool: sampled tokens of the rollouts that are learned from."""
    mask: Tensor = batch.response_mask & batch.reward_valid.unsqueeze(1)
    return mask
