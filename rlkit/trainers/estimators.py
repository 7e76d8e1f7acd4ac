"""The controllers that end a dataflow: from rewards to what the actor learns from, advantages or preferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlkit.algorithms.advantages import (
    gae,
    gpg_advantages,
    group_advantages,
    passk_advantages,
    place_rewards,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlkit.algorithms.kl import kl_estimate
from rlkit.algorithms.masked import masked_whiten
from rlkit.algorithms.preference_losses import best_and_worst
from rlkit.batch import RolloutBatch
from rlkit.controllers.base import Controller
from rlkit.trainers.nodes import HasConfig


class Estimator(Controller):
    """What all estimators share: which tokens are learned from, and rewards per token with the KL penalty in them.

    Args:
        live: holder of the settings in force.
        penalised: whether the KL penalty is part of the reward, measured by `logprobs` and `ref_logprobs`.
        corrected: whether the batch holds a `correction_mask`.
    """

    role = "advantage"
    heavy = False

    def __init__(self, live: HasConfig, penalised: bool = False, corrected: bool = False) -> None:
        super().__init__("advantages")
        self.live, self.penalised, self.corrected = live, penalised, corrected
        self.reads = ("rewards", "reward_valid", "response_mask", "finish_reasons", "groups", "temperatures")
        if penalised:
            self.reads += ("logprobs", "ref_logprobs")
        if corrected:
            self.reads += ("correction_mask",)

    def learn_mask(self, batch: RolloutBatch) -> Tensor:
        """(B,T) bool: sampled tokens of rollouts with a reward that neither truncation nor rejection drops.

        Responses that were sampled greedily are left out: their distribution is one token, whose probability cannot
        change. They neither give a gradient nor count where a loss is a mean over tokens.
        """
        mask: Tensor = batch.response_mask & (batch.reward_valid & batch.drawn_at_random).unsqueeze(1)
        if self.live.config.mask_truncated:
            mask = mask & ~truncated(batch).unsqueeze(1)
        return mask & batch.correction_mask if self.corrected else mask

    def token_rewards(self, batch: RolloutBatch) -> Tensor:
        """(B,T) rewards after the penalty was placed."""
        config = self.live.config
        kl = None
        if self.penalised and config.kl_coef:
            kl = kl_estimate(batch.logprobs, batch.ref_logprobs, config.kl_estimator)
        return place_rewards(batch.rewards, batch.response_mask, kl, config.kl_coef)


class GaeAdvantages(Estimator):
    """PPO's advantages and returns (B,T) by generalised advantage estimation."""

    writes = ("token_rewards", "advantages", "returns", "learn_mask")

    def __init__(self, live: HasConfig, penalised: bool = False, corrected: bool = False) -> None:
        super().__init__(live, penalised, corrected)
        self.reads += ("values",)
        if live.config.bootstrap_truncated:
            self.reads += ("bootstrap_values",)

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        config = self.live.config
        token_rewards, mask, learned = self.token_rewards(batch), batch.response_mask, self.learn_mask(batch)
        bootstrap = batch.bootstrap_values * truncated(batch) if config.bootstrap_truncated else None
        advantages, returns = gae(token_rewards, batch.values, mask, config.gamma, config.lam, bootstrap)
        if config.whiten_advantages and int(learned.sum()) > 1:
            advantages = masked_whiten(advantages, learned)
        return {
            "token_rewards": token_rewards,
            "advantages": advantages * learned,
            "returns": returns * mask,
            "learn_mask": learned,
        }


class CriticFreeAdvantages(Estimator):
    """Advantages (B,T) without a critic, by the estimator that the settings name."""

    writes = ("token_rewards", "advantages", "learn_mask")

    def __init__(self, live: HasConfig, penalised: bool = False, corrected: bool = False) -> None:
        super().__init__(live, penalised, corrected)
        if live.config.advantage_estimator == "remax":
            self.reads += ("reward_baselines",)

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        token_rewards, learned = self.token_rewards(batch), self.learn_mask(batch)
        advantages = self._estimate(batch, token_rewards, learned)
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        return {"token_rewards": token_rewards, "advantages": advantages * learned, "learn_mask": learned}

    def _estimate(self, batch: RolloutBatch, token_rewards: Tensor, learned: Tensor) -> Tensor:
        """(B,) or (B,T)."""
        config, groups, valid = self.live.config, batch.groups, batch.reward_valid
        totals = token_rewards.sum(1)
        match config.advantage_estimator:
            case "grpo":
                return group_advantages(totals, groups, scale_by_std=config.scale_by_std, valid=valid)
            case "rloo":
                return rloo_advantages(totals, groups, valid=valid)
            case "reinforce++":
                return reinforce_plus_plus_advantages(token_rewards, learned, config.gamma)[0]
            case "reinforce++-baseline":
                return reinforce_plus_plus_baseline_advantages(totals, groups, learned, valid=valid)
            case "remax":
                return remax_advantages(token_rewards, batch.reward_baselines, learned)[0]
            case "gpg":
                return gpg_advantages(totals, groups, valid=valid)
            case "pass@k":
                return passk_advantages(totals, groups, valid=valid, scale_by_std=config.scale_by_std)
            case "gdpo":  # terms are normalised within their groups before they are mixed
                spread = totals.unsqueeze(1) * learned
                return masked_whiten(spread, learned) if config.whiten_advantages and learned.sum() > 1 else spread


class GroupPreferences(Estimator):
    """Marks (B,) the best and the worst response of each group, the pairs of online DPO; groups without spread none."""

    role = "preference"
    writes = ("token_rewards", "preferences", "learn_mask")

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        token_rewards = self.token_rewards(batch)
        learned = self.learn_mask(batch)
        valid = batch.reward_valid & learned.any(1)
        chosen, rejected = best_and_worst(token_rewards.sum(1), batch.groups, valid=valid)
        preferences = torch.zeros_like(batch.rewards)
        preferences[chosen], preferences[rejected] = 1.0, -1.0
        return {"token_rewards": token_rewards, "preferences": preferences, "learn_mask": learned}


def truncated(batch: RolloutBatch) -> Tensor:
    """(B,) bool: responses cut off at the length limit."""
    reasons = [reason == "length" for reason in batch.finish_reasons]
    return torch.tensor(reasons, device=batch.response_mask.device)
