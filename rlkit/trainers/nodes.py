"""The controllers a trainer adds to a dataflow: mixing reward terms, scoring the policy, estimating advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rlkit.algorithms.advantages import gae, group_advantages
from rlkit.algorithms.kl import kl_estimate
from rlkit.algorithms.masked import masked_whiten
from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller
from rlkit.fields import Field
from rlkit.rewards import RewardWeights, mix

REWARD_VALID = Field("reward_valid", ("B",), "bool", "false where every reward term abstained; such rollouts are not learned from")


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


class TokenRewards:
    """Places a response's reward on its last token and the KL penalty on every token.

    Args:
        live: holder of `kl_coef`, `kl_estimator` and `kl_placement`.
        penalised: whether `logprobs` and `ref_logprobs` are there to measure the KL by.
    """

    def __init__(self, live: HasConfig, penalised: bool) -> None:
        self.live = live
        self.penalised = penalised
        self.reads: tuple[str, ...] = ("rewards", REWARD_VALID.name, "response_mask")
        if penalised:
            self.reads += ("logprobs", "ref_logprobs")

    def place(self, batch: RolloutBatch) -> Tensor:
        """Token rewards (B,T): reward on the last sampled token, minus kl_coef times the KL estimate per token."""
        config = self.live.config
        mask = batch.response_mask
        last = (batch.response_lengths - 1).clamp_min(0).unsqueeze(1)
        tokens = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        tokens.scatter_(1, last, batch.rewards.to(mask.device).unsqueeze(1))
        if self.penalised and config.kl_coef:
            kl = kl_estimate(batch.logprobs, batch.ref_logprobs, config.kl_estimator)
            tokens = tokens - config.kl_coef * kl
        return tokens * mask


class GaeAdvantages(Controller):
    """PPO's advantages and returns (B,T) by generalised advantage estimation."""

    role = "advantage"
    heavy = False
    writes = ("token_rewards", "advantages", "returns")

    def __init__(self, live: HasConfig, penalised: bool) -> None:
        super().__init__("advantages")
        self.live = live
        self.rewards = TokenRewards(live, penalised)
        self.reads = (*self.rewards.reads, "values", "finish_reasons")

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        config = self.live.config
        token_rewards = self.rewards.place(batch)
        mask = batch.response_mask
        bootstrap = _truncation_values(batch) if config.bootstrap_truncated else None
        advantages, returns = gae(token_rewards, batch.values, mask, config.gamma, config.lam, bootstrap=bootstrap)
        learned = loss_mask(batch)
        if config.whiten_advantages and int(learned.sum()) > 1:
            advantages = masked_whiten(advantages, learned)
        return {"token_rewards": token_rewards, "advantages": advantages * learned, "returns": returns * mask}


class GroupAdvantages(Controller):
    """GRPO's advantages (B,T): a response's reward against its group's mean (and standard deviation)."""

    role = "advantage"
    heavy = False
    writes = ("token_rewards", "advantages")

    def __init__(self, live: HasConfig, penalised: bool) -> None:
        super().__init__("advantages")
        self.live = live
        self.rewards = TokenRewards(live, penalised)
        self.reads = (*self.rewards.reads, "groups")

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        token_rewards = self.rewards.place(batch)
        scores = token_rewards.sum(1)
        valid = batch.reward_valid
        advantages = torch.zeros_like(scores)
        advantages[valid] = group_advantages(
            scores[valid], batch.groups.to(scores.device)[valid], scale_by_std=self.live.config.scale_by_std
        )
        return {"token_rewards": token_rewards, "advantages": advantages.unsqueeze(1) * loss_mask(batch)}


def loss_mask(batch: RolloutBatch) -> Tensor:
    """(B,T) bool: sampled tokens of the rollouts that are learned from."""
    mask: Tensor = batch.response_mask & batch.reward_valid.unsqueeze(1)
    return mask


def _truncation_values(batch: RolloutBatch) -> Tensor:
    """(B,) value of the last scored state for responses cut off at the limit, 0 for finished ones.

    The state after the last token is never scored by the critic, so its value is taken from the state before it.
    """
    last = (batch.response_lengths - 1).clamp_min(0).unsqueeze(1)
    cut = torch.tensor([reason == "length" for reason in batch.finish_reasons], device=last.device)
    return batch.values.gather(1, last).squeeze(1) * cut
