"""Does the quickstart learn? Mean reward of the first and the last ten steps, for PPO and GRPO on three seeds.

    python benchmarks/quickstart_learning.py [--algorithm ppo grpo] [--seeds 0 1 2] [--steps 40]

SmolLM2-135M-Instruct continues short openings; the reward is VADER's compound sentiment of the continuation, in
[-1, 1]. 16 rollouts a step, full fine-tuning in fp32. Beside the reward stand the signs of degenerate text: KL to the
starting policy, entropy, repeated bigrams, distinct responses; and samples of the last step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import rlkit
from rlkit import ActorController, CriticController, GRPOTrainer, PPOTrainer, ReferenceController

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPTS = [
    "The film was", "The food at the restaurant was", "My day has been", "I think the book is",
    "The weather today is", "Our trip to the coast was", "The new phone is", "The teacher said that",
    "Yesterday the meeting was", "The hotel room was", "This song makes me feel", "The game last night was",
    "When I woke up this morning,", "The service at the shop was", "My neighbour is", "The concert was",
]  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "ppo": {"lr": 5e-5, "critic_lr": 1e-3, "lam": 1.0, "kl_coef": 0.03},
    "grpo": {"lr": 4e-5, "group_size": 4, "kl_coef": 0.05},
}


def sentiment() -> Any:
    """VADER's compound score of each response, in [-1, 1]."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyser = SentimentIntensityAnalyzer()

    def score(responses: list[str]) -> list[float]:
        return [analyser.polarity_scores(response)["compound"] for response in responses]

    return score


def build(algorithm: str, seed: int, **changes: Any) -> PPOTrainer | GRPOTrainer:
    """A trainer of the benchmark."""
    config = {"batch_size": 16, "max_new_tokens": 24, "seed": seed, **RECIPES[algorithm], **changes}
    actor = ActorController(MODEL, dtype=torch.float32)
    reference = ReferenceController(actor)
    rewards = {"sentiment": sentiment()}
    if algorithm == "grpo":
        return GRPOTrainer(actor, rewards, reference, prompts=PROMPTS, config=config)
    return PPOTrainer(
        actor, CriticController(trunk=actor, train_trunk=False), rewards, reference, prompts=PROMPTS, config=config
    )


def run(algorithm: str, seed: int, steps: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Trains one seed and sums it up."""
    trainer = build(algorithm, seed, **changes)
    history, seconds = [], []
    for step in range(steps):
        started = time.perf_counter()
        result = trainer.step()
        seconds.append(time.perf_counter() - started)
        history.append(result.metrics)
        shown = {name: round(result.metrics[name], 3) for name in ("reward/mean", "kl/per_token", "train/entropy")}
        print(f"  {algorithm} seed {seed} step {step + 1:3d}  {seconds[-1]:5.1f} s  {shown}", flush=True)

    def mean(name: str, part: list[dict[str, float]]) -> float:
        return statistics.fmean(entry[name] for entry in part)

    first, last = history[:10], history[-10:]
    summary = {
        "algorithm": algorithm,
        "seed": seed,
        "first": mean("reward/mean", first),
        "last": mean("reward/mean", last),
        "kl": mean("kl/per_token", last),
        "entropy_first": mean("train/entropy", first),
        "entropy": mean("train/entropy", last),
        "repeated_first": mean("rollout/repeated_bigram_fraction", first),
        "repeated": mean("rollout/repeated_bigram_fraction", last),
        "distinct": mean("rollout/distinct_response_fraction", last),
        "step_s": statistics.median(seconds),
    }
    table = result.rollouts
    samples = list(zip(table["prompt"], table["response"], table["reward"], strict=True))[:4]
    return {**summary, "samples": samples}


def main() -> None:
    """Prints one line a run and the samples of its last step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", nargs="+", default=["ppo", "grpo"], choices=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--set", default="{}", help="JSON of configuration changes")
    parser.add_argument("--out", type=Path, default=None, help="also write the results as JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"rlkit {rlkit.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    results = [
        run(algorithm, seed, options.steps, json.loads(options.set))
        for algorithm in options.algorithm
        for seed in options.seeds
    ]
    columns = "algorithm | seed | first 10 | last 10 | gain | KL/token | entropy | repeated bigrams | distinct | s/step"
    print(f"\n| {columns} |\n{'|---' * 10}|")
    for r in results:
        print(
            f"| {r['algorithm']} | {r['seed']} | {r['first']:.3f} | {r['last']:.3f} | {r['last'] - r['first']:+.3f} "
            f"| {r['kl']:.3f} | {r['entropy_first']:.2f} → {r['entropy']:.2f} "
            f"| {r['repeated_first']:.3f} → {r['repeated']:.3f} | {r['distinct']:.2f} | {r['step_s']:.1f} |"
        )
    for r in results:
        print(f"\nsamples, {r['algorithm']} seed {r['seed']}:")
        for prompt, response, reward in r["samples"]:
            print(f"  {reward:+.2f}  {prompt}|{response!r}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
