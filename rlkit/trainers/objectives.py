"""Losses as a learner takes them: cut into micro-batches, weighed once for a whole minibatch, measured on the way."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rlkit.algorithms.aggregation import token_weights
from rlkit.algorithms.kl import kl_estimate
from rlkit.algorithms.policy_losses import LossMetrics
from rlkit.algorithms.preference_losses import dpo_loss, sequence_logprobs
from rlkit.algorithms.value_losses import clipped_value_loss
from rlkit.batch import RolloutBatch
from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.controllers.parts import narrowed
from rlkit.data.pairs import PreferenceBatch
from rlkit.engines.attention import packs
from rlkit.engines.logprobs import EntropyMode, TokenScores
from rlkit.engines.train import TrainEngine
from rlkit.metrics import MetricsTracker
from rlkit.trainers.nodes import HasConfig
from rlkit.trainers.policy_loss import policy_loss

Batch = TypeVar("Batch", RolloutBatch, PreferenceBatch)


class Objective(Protocol[Batch]):
    """One loss on the actor (and on who learns with it), over a batch that can be cut into rows or pairs."""

    @property
    def packed(self) -> bool:
        """Whether its models lay sequences end to end, rather than pad them to the longest."""
        ...

    def needed(self, minibatch: Batch) -> Batch:
        """The units of a minibatch that have a gradient, one at least; the others need no forward pass."""
        ...

    def weights(self, minibatch: Batch) -> Tensor:
        """Weight of each part of the loss, one row a unit of the batch; slices of it go to `accumulate`."""
        ...

    def accumulate(self, part: Batch, weights: Tensor, share: float, first: bool) -> None:
        """Adds the gradient of `share * sum(loss * weights)` on a micro-batch.

        Args:
            part: units of a minibatch.
            weights: their rows of `weights(minibatch)`.
            share: factor on the whole loss.
            first: true before the first update of a step.
        """
        ...


class PolicyObjective:
    """A policy loss on rollouts, with KL and entropy terms, and the value loss of a critic where there is one.

    Args:
        live: holder of the settings in force.
        actor: the policy.
        critic: the value function, if any.
        engine: takes the gradients of the actor, and of a critic on its trunk.
        critic_engine: takes those of a critic with a model of its own.
        tracker: takes the metrics, pooled over micro-batches as sums and counts.
    """

    def __init__(
        self,
        live: HasConfig,
        actor: ActorController,
        critic: CriticController | None,
        engine: TrainEngine,
        critic_engine: TrainEngine | None,
        tracker: MetricsTracker,
    ) -> None:
        self.live, self.actor, self.critic, self.tracker = live, actor, critic, tracker
        self.engine, self.critic_engine = engine, critic_engine
        self.shares_trunk = critic is not None and critic.trunk is not None

    @property
    def packed(self) -> bool:
        models = [self.actor.model] if self.critic is None else [self.actor.model, self.critic.model]
        return all(packs(model) for model in models)

    def needed(self, minibatch: RolloutBatch) -> RolloutBatch:
        """Rollouts with a token that is learned from; greedy ones have none, nor those that a rule leaves out."""
        return narrowed(minibatch, minibatch.learn_mask.any(1))

    def weights(self, minibatch: RolloutBatch) -> Tensor:
        """Token weights (B,T) of the whole minibatch, so that any split gives the same gradient."""
        config = self.live.config
        return token_weights(minibatch.learn_mask, config.loss_aggregation, fixed_length=config.max_new_tokens)

    def accumulate(self, part: RolloutBatch, weights: Tensor, share: float, first: bool) -> None:
        part = part.trim()
        weights = weights[:, : part.response_width]
        config = self.live.config
        entropy: EntropyMode = "differentiable" if config.entropy_coef else "value"
        with self.tracker.span("update/forward"):
            sampled = part.sampled(config.temperature)
            scores = self.actor.scores(part, sampled, entropy=entropy, hidden=self.shares_trunk)
            loss = self._policy_loss(part, scores, weights, first)
            if self.critic is not None and scores.hidden is not None:
                loss = loss + config.value_coef * self._value_loss(self.critic, part, scores.hidden, weights)
        with self.tracker.span("update/backward"):
            self.engine.backward(share * loss)
        if self.critic is not None and self.critic_engine is not None:
            with self.tracker.span("update/critic"):
                self.critic_engine.backward(self._value_loss(self.critic, part, self.critic.states(part), weights))

    def _policy_loss(self, part: RolloutBatch, scores: TokenScores, weights: Tensor, first: bool) -> Tensor:
        config, mask, logprobs = self.live.config, part.learn_mask, scores.logprobs
        old = part.logprobs if "logprobs" in part else logprobs.detach()
        objective, metrics = policy_loss(config, logprobs, old, part.advantages, mask)
        if "correction_weights" in part:
            objective = objective * part.correction_weights
        track(self.tracker, metrics)
        if first:
            self._measure_gaps(logprobs.detach(), old, part)
        if config.kl_placement == "loss" and config.kl_coef:
            objective = objective + config.kl_coef * kl_estimate(logprobs, part.ref_logprobs, config.kl_estimator)
        assert scores.entropy is not None
        self.tracker.add_sum_count("train/entropy", (scores.entropy.detach() * mask).sum(), mask.sum())
        if config.entropy_coef:
            objective = objective - config.entropy_coef * scores.entropy
        return (objective * weights).sum()

    def _value_loss(self, critic: CriticController, part: RolloutBatch, hidden: Tensor, weights: Tensor) -> Tensor:
        values = critic.values_of(hidden)
        clip = self.live.config.value_clip
        token_loss, metrics = clipped_value_loss(values, part.values, part.returns, part.learn_mask, clip)
        track(self.tracker, metrics)
        return (token_loss * weights).sum()

    def _measure_gaps(self, logprobs: Tensor, old: Tensor, part: RolloutBatch) -> None:
        """How far the first forward of the update lies from the scores before it, and from the sampler's."""
        mask = part.response_mask & part.drawn_at_random.unsqueeze(1)
        drift = ((logprobs - old).abs() * mask).max()
        gap = (logprobs - part.rollout_logprobs).abs() * mask
        self.tracker.add("train/first_ratio_max_abs_log", drift)
        self.tracker.add_sum_count("rollout/logprob_gap_mean", gap.sum(), mask.sum())
        self.tracker.add("rollout/logprob_gap_max", gap.max())


class PreferenceObjective:
    """DPO's loss on pairs that hold the reference's log-probs, unless the loss is reference-free.

    Args:
        live: holder of `beta`, `preference_loss`, `label_smoothing` and `average_logprobs`.
        actor: the policy.
        engine: takes its gradients.
        tracker: takes the metrics.
    """

    def __init__(self, live: HasConfig, actor: ActorController, engine: TrainEngine, tracker: MetricsTracker) -> None:
        self.live, self.actor, self.engine, self.tracker = live, actor, engine, tracker

    @property
    def packed(self) -> bool:
        return packs(self.actor.model)

    def needed(self, minibatch: PreferenceBatch) -> PreferenceBatch:
        return minibatch

    def weights(self, minibatch: PreferenceBatch) -> Tensor:
        """(N,): every pair counts the same."""
        return torch.full((len(minibatch),), 1.0 / max(len(minibatch), 1))

    def accumulate(self, part: PreferenceBatch, weights: Tensor, share: float, first: bool) -> None:
        part, config = part.trim(), self.live.config
        average = config.preference_loss == "ipo" if config.average_logprobs is None else config.average_logprobs
        with self.tracker.span("preferences/forward"):
            scores = self.actor.scores(part.rollouts, part.rollouts.sampled(config.temperature))
            mask = part.rollouts.response_mask
            policy = sequence_logprobs(scores.logprobs, mask, average)
            reference = None
            if "ref_logprobs" in part.rollouts:
                reference = sequence_logprobs(part.rollouts.ref_logprobs, mask, average)
            pair_loss, metrics = dpo_loss(
                policy[0::2],
                policy[1::2],
                None if reference is None else reference[0::2],
                None if reference is None else reference[1::2],
                config.beta,
                config.preference_loss,
                config.label_smoothing,
            )
            loss = (pair_loss * weights.to(pair_loss)).sum()
        self.tracker.add_sum_count("preferences/loss", pair_loss.detach().sum(), len(part))
        for side, rows in (("chosen", slice(0, None, 2)), ("rejected", slice(1, None, 2))):
            self.tracker.add_sum_count(f"preferences/{side}_logprob", policy.detach()[rows].sum(), len(part))
        track(self.tracker, metrics, area="preferences")
        with self.tracker.span("preferences/backward"):
            self.engine.backward(share * loss)


def track(tracker: MetricsTracker, metrics: LossMetrics, area: str = "train") -> None:
    """Adds a loss's metrics, pooled as sums and counts."""
    for name, (total, count) in metrics.items():
        tracker.add_sum_count(f"{area}/{name}", total, count)
