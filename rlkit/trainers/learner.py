"""The learning half of a step: passes over the rollouts, minibatches, micro-batches, losses, optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlkit.algorithms.aggregation import token_weights
from rlkit.algorithms.kl import kl_estimate
from rlkit.algorithms.policy_losses import ppo_clip_loss
from rlkit.algorithms.value_losses import clipped_value_loss
from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.engines.logprobs import EntropyMode, TokenScores
from rlkit.engines.train import Group, TrainEngine
from rlkit.metrics import MetricsTracker
from rlkit.schedules import learning_rate
from rlkit.trainers.nodes import HasConfig, loss_mask


class Learner:
    """Learns from scored rollouts: PPO's clipped objective, with a value loss where there is a critic.

    Args:
        live: holder of the settings in force.
        actor: the policy.
        critic: the value function, if any. One on the actor's trunk is updated together with the actor, one with a
            model of its own beside it.
        tracker: takes the metrics, pooled over micro-batches as sums and counts.
    """

    def __init__(
        self, live: HasConfig, actor: ActorController, critic: CriticController | None, tracker: MetricsTracker
    ) -> None:
        config = live.config
        self.live, self.actor, self.critic, self.tracker = live, actor, critic, tracker
        self.shares_trunk = critic is not None and critic.trunk is not None
        groups = [Group("actor", actor.model, actor.optimizer)]
        own: list[Group] = []
        if critic is not None:
            (groups if self.shares_trunk else own).append(Group("critic", critic.trained_module, critic.optimizer))
        self.engine = TrainEngine(groups, config.weight_decay, config.max_bad_steps)
        self.critic_engine = TrainEngine(own, config.weight_decay, config.max_bad_steps) if own else None
        self.order = torch.Generator().manual_seed(config.seed)

    def rates(self, step: int) -> dict[str, float]:
        """Learning rate of actor and critic at a step (counted from 0), after warm-up and decay."""
        config = self.live.config
        assert config.lr is not None
        peaks = {"actor": config.lr, "critic": config.lr if config.critic_lr is None else config.critic_lr}
        return {
            name: learning_rate(config.lr_schedule, peak, step, config.warmup_steps, config.total_steps)
            for name, peak in peaks.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state and the random state that orders minibatches."""
        critic = {} if self.critic_engine is None else self.critic_engine.state_dict()
        return {"engine": self.engine.state_dict(), "critic_engine": critic, "order": self.order.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.engine.load_state_dict(state["engine"])
        if self.critic_engine is not None:
            self.critic_engine.load_state_dict(state["critic_engine"])
        self.order.set_state(state["order"])

    def release(self) -> None:
        """Drops optimizer state and gradients."""
        for engine in (self.engine, self.critic_engine):
            if engine is not None:
                engine.release()

    def learn(self, batch: RolloutBatch, step: int) -> None:
        """Makes `ppo_epochs` passes over the batch at the learning rates of `step`.

        Before the first update the ratio of new to old policy is 1.
        """
        config = self.live.config
        rates = self.rates(step)
        self.engine.set_lr(rates)
        if self.critic_engine is not None:
            self.critic_engine.set_lr(rates)
        self.tracker.add("train/lr", rates["actor"])
        first = True
        for _ in range(config.ppo_epochs):
            for minibatch in self._minibatches(batch, config):
                self._update(minibatch, config, first)
                first = False

    def _minibatches(self, batch: RolloutBatch, config: TrainerConfig) -> Iterator[RolloutBatch]:
        size = config.minibatch_size or batch.batch_size
        if size >= batch.batch_size:
            yield batch
            return
        order = torch.randperm(batch.batch_size, generator=self.order)
        for start in range(0, batch.batch_size, size):
            yield batch.select(order[start : start + size])

    def _update(self, minibatch: RolloutBatch, config: TrainerConfig, first: bool) -> None:
        """One optimizer update. Token weights belong to the whole minibatch, so any split gives the same gradient."""
        mask = loss_mask(minibatch)
        weights = token_weights(mask, config.loss_aggregation, fixed_length=config.max_new_tokens)
        size = config.micro_batch_size or minibatch.batch_size
        for start in range(0, minibatch.batch_size, size):
            rows = slice(start, start + size)
            part = minibatch.select(rows).trim()
            self._accumulate(part, weights[rows, : part.response_width], config, first)
        self._apply(config)

    def _accumulate(self, part: RolloutBatch, weights: Tensor, config: TrainerConfig, first: bool) -> None:
        entropy: EntropyMode = "differentiable" if config.entropy_coef else "value"
        with self.tracker.span("update/forward"):
            scores = self.actor.scores(part, config.temperature, entropy=entropy, hidden=self.shares_trunk)
            loss = self._policy_loss(part, scores, weights, config, first)
            if self.critic is not None and scores.hidden is not None:
                loss = loss + config.value_coef * self._value_loss(self.critic, part, scores.hidden, weights, config)
        with self.tracker.span("update/backward"):
            self.engine.backward(loss)
        if self.critic is not None and self.critic_engine is not None:
            with self.tracker.span("update/critic"):
                value_loss = self._value_loss(self.critic, part, self.critic.states(part), weights, config)
                self.critic_engine.backward(value_loss)

    def _policy_loss(
        self, part: RolloutBatch, scores: TokenScores, weights: Tensor, config: TrainerConfig, first: bool
    ) -> Tensor:
        mask = loss_mask(part)
        logprobs = scores.logprobs
        old = part.logprobs if "logprobs" in part else logprobs.detach()
        token_loss, metrics = ppo_clip_loss(
            logprobs, old, part.advantages, mask, config.clip_low, config.clip_high, config.dual_clip
        )
        for name, (total, count) in metrics.items():
            self.tracker.add_sum_count(f"train/{name}", total, count)
        if first:
            self._measure_gaps(logprobs.detach(), old, part.rollout_logprobs, mask)
        objective = token_loss
        if config.kl_placement == "loss" and config.kl_coef:
            objective = objective + config.kl_coef * kl_estimate(logprobs, part.ref_logprobs, config.kl_estimator)
        assert scores.entropy is not None
        self.tracker.add_sum_count("train/entropy", (scores.entropy.detach() * mask).sum(), mask.sum())
        if config.entropy_coef:
            objective = objective - config.entropy_coef * scores.entropy
        return (objective * weights).sum()

    def _value_loss(
        self, critic: CriticController, part: RolloutBatch, hidden: Tensor, weights: Tensor, config: TrainerConfig
    ) -> Tensor:
        values = critic.values_of(hidden)
        mask = loss_mask(part)
        token_loss, metrics = clipped_value_loss(values, part.values, part.returns, mask, config.value_clip)
        for name, (total, count) in metrics.items():
            self.tracker.add_sum_count(f"train/{name}", total, count)
        return (token_loss * weights).sum()

    def _measure_gaps(self, logprobs: Tensor, old: Tensor, rollout: Tensor, mask: Tensor) -> None:
        """How far the first forward of the update lies from the scores before it, and from the sampler's."""
        drift = ((logprobs - old).abs() * mask).max()
        gap = (logprobs - rollout).abs() * mask
        self.tracker.add("train/first_ratio_max_abs_log", drift)
        self.tracker.add_sum_count("rollout/logprob_gap_mean", gap.sum(), mask.sum())
        self.tracker.add("rollout/logprob_gap_max", gap.max())

    def _apply(self, config: TrainerConfig) -> None:
        skipped = self.engine.skipped
        with self.tracker.span("update/optimizer"):
            norm = self.engine.step(config.max_grad_norm)
        self.tracker.add("train/grad_norm", norm)
        if self.critic_engine is not None:
            self.tracker.add("train/critic_grad_norm", self.critic_engine.step(config.max_grad_norm))
        self.tracker.add("train/skipped_updates", self.engine.skipped - skipped)
        self.actor.policy_version += 1
