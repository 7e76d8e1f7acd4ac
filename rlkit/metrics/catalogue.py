"""The metrics that rlkit itself reports: how each is reduced, its unit and what it says."""

from __future__ import annotations

from typing import NamedTuple

from rlkit.metrics.reduce import Last, Max, Mean, Rate, Reduction, Sum


class MetricInfo(NamedTuple):
    """One entry of `METRICS`."""

    reduction: type[Reduction]
    unit: str
    doc: str


METRICS: dict[str, MetricInfo] = {
    "rollout/throughput_tokens_per_sec": MetricInfo(
        Rate, "tokens/s", "Sampled response tokens per second of generation; padding is not counted."
    ),
    "rollout/tokens": MetricInfo(Sum, "tokens", "Sampled response tokens in the step; padding is not counted."),
    "rollout/response_length": MetricInfo(Mean, "tokens", "Mean response length."),
    "rollout/truncated_fraction": MetricInfo(Mean, "1", "Share of responses that hit the length limit."),
    "rollout/greedy_fraction": MetricInfo(
        Mean, "1", "Share of responses whose tokens were the most likely ones always; nothing is learned from them."
    ),
    "sync/bytes": MetricInfo(Sum, "bytes", "Weights handed to the generator; 0 where it reads the trainer's own."),
    "sync/seconds": MetricInfo(Sum, "s", "Time to hand the weights to the generator."),
    "reward/mean": MetricInfo(Mean, "1", "Mean mixed reward of the step's rollouts."),
    "reward/latency_ms": MetricInfo(Mean, "ms", "Time to score one batch with all reward terms."),
    "train/step_time_ms": MetricInfo(Last, "ms", "Wall-clock time of the whole step."),
    "train/lr": MetricInfo(Last, "1", "Learning rate in force."),
    "train/grad_norm": MetricInfo(Mean, "1", "Norm of the gradient before clipping."),
    "train/first_ratio_max_abs_log": MetricInfo(
        Max, "nats", "Largest log-ratio of new to old policy before the first update; 0 when both are scored alike."
    ),
    "rollout/logprob_gap_max": MetricInfo(
        Max, "nats", "Largest difference of a token's log-prob between trainer and sampler."
    ),
    "train/skipped_updates": MetricInfo(
        Sum, "updates", "Optimizer updates left out because a gradient was not finite."
    ),
    "memory/process_rss_mb": MetricInfo(Max, "MB", "Resident memory of the driver process."),
    "memory/actor_gpu_mem_mb": MetricInfo(Max, "MB", "Memory that this process holds on the actor's GPU."),
    "memory/critic_gpu_mem_mb": MetricInfo(Max, "MB", "Memory that this process holds on the critic's GPU."),
    "memory/reward_gpu_mem_mb": MetricInfo(Max, "MB", "Memory that this process holds on the reward model's GPU."),
    "memory/reference_gpu_mem_mb": MetricInfo(Max, "MB", "Memory that this process holds on the reference's GPU."),
}


def default_reduction(name: str) -> type[Reduction]:
    """The reduction of a metric that was not declared: from `METRICS`, Max for other memory/ names, else Mean."""
    info = METRICS.get(name)
    if info is not None:
        return info.reduction
    return Max if name.startswith("memory/") else Mean
