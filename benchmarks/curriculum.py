"""Does a curriculum help? Steps to a target score with a curriculum and without; everything else is the same.

    python benchmarks/curriculum.py [--seeds 0 1 2] [--lr 0.001] [--tune 0.001 0.002 0.004]

The task: count on. The prompt names a number and one of twelve letters; the response must begin with as many of the
letters that follow it in a circle: "4 k" asks for "l a b c". The reward is 1 for all of them and else 0. An untrained
policy gets one letter right in one of nineteen responses and eight of them never, so that long prompts teach nothing
before short ones are learned. A language model of two layers of width 64, trained from nothing by GRPO without a
reference, 8 prompts x 8 responses a step.

Only the prompts differ. "uniform": all lengths, mixed evenly from the first step on. "by reach": stages, each of one
length, that go on when most responses to that length are right; the last stage is the uniform mixture. "by steps":
the same stages after 10 steps each. "by pass rate": one stage, which prefers lengths neither solved nor hopeless.

The score is the share of right responses, sampled at temperature 1, over all 72 prompts with 8 responses each, and is
taken every 5 steps. All lengths count alike in it, as they do in the uniform mixture. `--tune` looks for the learning
rate that is best for the uniform mixture, on seeds that the comparison does not use; the others take the same. Where
the target was not reached, the steps given are the cap; if that is the baseline, the ratio shown is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rlkit
from rlkit import ActorController, Curriculum, GRPOTrainer, Reaches, Stage, Steps

LETTERS = "abcdefghijkl"
LENGTHS = (1, 2, 3, 4, 6, 8)
BASELINE = "uniform"
EVERY = 5
CONFIG: dict[str, Any] = {
    "batch_size": 64,
    "group_size": 8,
    "max_new_tokens": max(LENGTHS),
    "entropy_coef": 0.01,
    "threads": 1,
}


def tasks() -> dict[str, list[dict[str, str]]]:
    """Every prompt there is, by length."""
    return {
        f"{length}": [
            {
                "prompt": f"{length} {letter}",
                "answer": " ".join(LETTERS[(start + i) % 12] for i in range(1, length + 1)),
            }
            for start, letter in enumerate(LETTERS)
        ]
        for length in LENGTHS
    }


def right(response: str, answer: str) -> float:
    """1 for a response that begins with the answer."""
    return float(response.split()[: len(answer.split())] == answer.split())


def curricula() -> dict[str, list[Stage]]:
    """The stages of each way to mix the lengths, the baseline first."""
    even = {f"{length}": 1.0 for length in LENGTHS}
    return {
        BASELINE: [Stage("all", even)],
        "by reach": [
            *(Stage(pool, {pool: 1.0}, until=Reaches(f"curriculum/{pool}_pass_rate", 0.6)) for pool in even),
            Stage("all", even),
        ],
        "by steps": [*(Stage(pool, {pool: 1.0}, until=Steps(10)) for pool in even), Stage("all", even)],
        "by pass rate": [Stage("all", "by_pass_rate")],
    }


def policy(seed: int) -> ActorController:
    """A policy with random weights; its words are the numbers and letters."""
    words = ["</s>", *map(str, LENGTHS), *LETTERS]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="</s>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return ActorController(LlamaForCausalLM(config), tokenizer)


def run(stages: Sequence[Stage], seed: int, lr: float, target: float, cap: int) -> dict[str, Any]:
    """Trains one policy until its score reaches the target, at most `cap` steps."""
    pools = tasks()
    scored = [row for rows in pools.values() for row in rows]
    trainer = GRPOTrainer(
        policy(seed), right, prompts=Curriculum(pools, stages), config={**CONFIG, "lr": lr, "seed": seed}
    )
    began, scores = time.process_time(), []
    while trainer.global_step < cap and (not scores or scores[-1] < target):
        for _ in range(EVERY):
            trainer.step()
        scores.append(float(trainer.evaluate(scored, count=len(scored)).rewards.mean()))
    return {
        "seed": seed,
        "lr": lr,
        "steps": trainer.global_step,
        "arrived": scores[-1] >= target,
        "scores": scores,
        "moves": [f"{move['to']} after {move['step']}" for move in trainer.prompts.history()[1:]],
        "cpu_s": time.process_time() - began,
    }


def told(name: str, result: dict[str, Any]) -> str:
    """A run in a line."""
    moves = f"; {', '.join(result['moves'])}" if result["moves"] else ""
    return (
        f"  seed {result['seed']} {name:12s} lr {result['lr']:g}: {'' if result['arrived'] else 'not '}there after "
        f"{result['steps']:4d} steps, score {result['scores'][-1]:.2f}, {result['cpu_s']:.0f} s of CPU{moves}"
    )


def tune(options: argparse.Namespace) -> None:
    """Steps of the baseline at several learning rates, on other seeds than those of the comparison."""
    print("| lr | median steps without a curriculum | score then |\n|---|---|---|")
    for lr in options.tune:
        results = [run(curricula()[BASELINE], seed + 100, lr, options.target, options.cap) for seed in options.seeds]
        steps, score = (
            statistics.median(values) for values in ([r["steps"] for r in results], [r["scores"][-1] for r in results])
        )
        print(f"| {lr:g} | {steps:g} | {score:.2f} |", flush=True)


def compare(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Runs each seed in each way, and prints the table."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in (BASELINE, *options.ways)}
    for seed in options.seeds:
        for name in results:
            results[name].append(run(curricula()[name], seed, options.lr, options.target, options.cap))
            print(told(name, results[name][-1]), flush=True)
    others = [name for name in results if name != BASELINE]
    print(f"\n| seed | {BASELINE} | {' | '.join(f'{name} | ratio' for name in others)} |")
    print("|---" * (2 + 2 * len(others)) + "|")
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for place, seed in enumerate(options.seeds):
        without = results[BASELINE][place]
        cells = [f"{seed}", steps_of(without)]
        for name in others:
            ratios[name].append(results[name][place]["steps"] / without["steps"])
            cells += [steps_of(results[name][place]), f"{ratios[name][-1]:.2f}"]
        print(f"| {' | '.join(cells)} |")
    medians = [statistics.median(r["steps"] for r in results[BASELINE])]
    cells = [f"{medians[0]:g}"]
    for name in others:
        cells += [f"{statistics.median(r['steps'] for r in results[name]):g}", f"{statistics.median(ratios[name]):.2f}"]
    print(f"| median | {' | '.join(cells)} |")
    return results


def steps_of(result: dict[str, Any]) -> str:
    """Steps taken, marked where they did not suffice."""
    return f"{result['steps']}" if result["arrived"] else f"> {result['steps']}"


def main() -> None:
    """Prints a line a run, and the table of steps and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--target", type=float, default=0.8, help="share of right responses")
    parser.add_argument("--cap", type=int, default=500, help="steps after which a run is given up")
    parser.add_argument("--tune", nargs="+", type=float, default=None, help="learning rates to try on the baseline")
    parser.add_argument("--ways", nargs="+", default=list(curricula())[1:], choices=list(curricula())[1:])
    parser.add_argument("--out", type=Path, default=None, help="also write the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"rlkit {rlkit.__version__}, torch {torch.__version__}, transformers {transformers.__version__}; "
        f"target {options.target:g}, lr {options.lr:g}, at most {options.cap} steps"
    )
    if options.tune:
        tune(options)
        return
    results = compare(options)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
