"""What a step reports: metrics of its rollouts, and the table of rollouts for the run folder."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkit.algorithms.kl import kl_estimate
from rlkit.batch import RolloutBatch
from rlkit.curriculum import CurriculumSource
from rlkit.data.pairs import PreferenceBatch
from rlkit.trainers.filling import spread_rows

if TYPE_CHECKING:
    from rlkit.trainers.rollouts import RolloutTrainer


def measure(trainer: RolloutTrainer, batch: RolloutBatch) -> None:
    """Adds the metrics of a step's rollouts to the trainer's tracker."""
    _measure_rewards(trainer, batch)
    _measure_responses(trainer, batch)
    tracker = trainer.tracker
    if isinstance(trainer.prompts, CurriculumSource):
        for name, value in trainer.prompts.metrics().items():
            tracker.add(name, value)
    if "ref_logprobs" in batch:
        kl, drawn = reference_kl(batch), batch.drawn_at_random
        tracker.add_sum_count("kl/per_token", kl.sum(), batch.response_lengths[drawn].sum())
        tracker.add_sum_count("kl/per_response", kl.sum(), drawn.sum())
        tracker.add("kl/coef", trainer.config.kl_coef)


def _measure_rewards(trainer: RolloutTrainer, batch: RolloutBatch) -> None:
    tracker = trainer.tracker
    valid = batch.reward_valid
    tracker.add_sum_count("reward/mean", batch.rewards[valid].sum(), int(valid.sum()))
    if int(valid.sum()) > 1:
        tracker.add("reward/std", batch.rewards[valid].std())
    for name, term in batch.reward_terms.items():
        given = ~term.isnan()
        if bool(given.any()):
            tracker.add_sum_count(f"reward/{name}", term[given].sum(), int(given.sum()))
    tracker.add("reward/abstained_fraction", 1.0 - valid.float().mean())
    if trainer.config.group_size > 1:
        flat = ~spread_rows(batch)
        tracker.add_sum_count("rollout/groups_without_spread_fraction", flat.sum(), batch.batch_size)
    if "learn_mask" in batch:
        dropped = batch.response_mask & ~batch.learn_mask
        tracker.add_sum_count("train/tokens_left_out_fraction", dropped.sum(), batch.response_mask.sum())
    failures = Counter[str]()
    for reward in trainer.rewards:
        if reward.may_fail:
            failures.update(reward.take_failures())
    for kind, count in failures.items():
        tracker.add(f"reward/{kind}", count)
    latencies = [reward.take_latency() for reward in trainer.rewards]
    tracker.add("reward/latency_ms", 1e3 * sum(latencies))


def _measure_responses(trainer: RolloutTrainer, batch: RolloutBatch) -> None:
    tracker = trainer.tracker
    lengths = batch.response_lengths
    tracker.add_sum_count("rollout/throughput_tokens_per_sec", lengths.sum(), trainer.actor.generation_seconds)
    synced = trainer.actor.take_synced()
    tracker.add("sync/bytes", synced.bytes)
    tracker.add("sync/seconds", synced.seconds)
    tracker.add_sum_count("rollout/tokens", lengths.sum(), 1)
    tracker.add_sum_count("rollout/response_length", lengths.sum(), batch.batch_size)
    if trainer.config.adaptive_sampling:
        tracker.add_sum_count("rollout/greedy_fraction", (~batch.drawn_at_random).sum(), batch.batch_size)
    cut = sum(reason == "length" for reason in batch.finish_reasons)
    tracker.add_sum_count("rollout/truncated_fraction", cut, batch.batch_size)
    repeated, bigrams = repeated_bigrams(batch)
    tracker.add_sum_count("rollout/repeated_bigram_fraction", repeated, bigrams)
    tracker.add("rollout/distinct_response_fraction", len(set(batch.responses)) / batch.batch_size)


def repeated_bigrams(batch: RolloutBatch) -> tuple[int, int]:
    """Bigrams of a response that stood earlier in the same response, and all bigrams, over the batch.

    The share of the two is 1 minus distinct-2 (Li et al. 2016), a sign of degenerate text.
    """
    tails = batch.generated_ids[:, batch.prompt_width :]
    real = batch.response_mask[:, 1:]
    rows = torch.arange(len(tails), device=tails.device).unsqueeze(1)
    base = int(tails.max()) + 1 if tails.numel() else 1
    pairs = ((rows * base + tails[:, :-1]) * base + tails[:, 1:])[real]  # one number a row and bigram
    return len(pairs) - len(torch.unique(pairs)), len(pairs)


def reference_kl(batch: RolloutBatch) -> Tensor:
    """(B,T) k3 estimate of the KL from the policy that sampled to the reference, in nats; 0 off the response.

    It is 0 in greedy responses too, where policy and reference give the token that was taken a probability of 1.
    """
    policy = batch.logprobs if "logprobs" in batch else batch.rollout_logprobs
    kl: Tensor = kl_estimate(policy, batch.ref_logprobs, "k3") * batch.response_mask
    return kl


def rollout_table(batch: RolloutBatch) -> dict[str, list[Any]]:
    """Columns of the run folder's rollout table, one entry a rollout (B each)."""
    table: dict[str, list[Any]] = {
        "row": batch.rows.tolist(),
        "group": batch.groups.tolist(),
        "prompt": batch.prompts,
        "response": batch.responses,
        "reward": _numbers(batch.rewards.masked_fill(~batch.reward_valid, math.nan)),
    }
    for name, term in batch.reward_terms.items():
        table[f"reward/{name}"] = _numbers(term)
    table["response_length"] = batch.response_lengths.tolist()
    table["finish_reason"] = batch.finish_reasons
    table["policy_version"] = batch.policy_versions.tolist()
    if "advantages" in batch:
        mask = batch.response_mask
        table["advantage"] = _numbers((batch.advantages * mask).sum(1) / mask.sum(1).clamp_min(1))
    if "preferences" in batch:
        table["preference"] = _numbers(batch.preferences)
    return table


def pair_table(pairs: PreferenceBatch) -> dict[str, list[Any]]:
    """Columns of the run folder's rollout table for pairs, one entry an answer (2N each), the chosen one first."""
    batch = pairs.rollouts
    return {
        "row": batch.rows.tolist(),
        "group": batch.groups.tolist(),
        "prompt": batch.prompts,
        "response": batch.responses,
        "preference": _numbers(batch.preferences),
        "response_length": batch.response_lengths.tolist(),
    }


def _numbers(values: Tensor) -> list[float | None]:
    """Plain numbers; None where a term abstained."""
    return [None if math.isnan(value) else value for value in values.to(torch.float64).tolist()]
