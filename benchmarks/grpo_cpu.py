"""GRPO on the CPU, rlkit against TRL, the same work in one run.

    python benchmarks/grpo_cpu.py [--steps 10] [--threads 2]

SmolLM2-135M-Instruct in fp32, full fine-tuning, 4 prompts x 4 responses of 24 tokens, VADER sentiment, no KL, one
update a step. The two take turns, step by step, so that a noisy machine troubles both alike. Needs trl (`.[dev]`).
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch
import transformers
import trl
from quickstart_learning import MODEL, PROMPTS, sentiment

import rlkit
from rlkit import ActorController, GRPOTrainer
from rlkit.engines.models import load_causal_lm, load_tokenizer

TOKENS, GROUP, ROLLOUTS, LR = 24, 4, 16, 2e-5


def rlkit_trainer() -> GRPOTrainer:
    """rlkit's side."""
    actor = ActorController(MODEL, dtype=torch.float32)
    config = {"batch_size": ROLLOUTS, "group_size": GROUP, "max_new_tokens": TOKENS, "lr": LR, "seed": 0}
    return GRPOTrainer(actor, {"sentiment": sentiment()}, prompts=PROMPTS, config=config)


def trl_trainer(steps: int, folder: str, callback: transformers.TrainerCallback) -> Any:
    """TRL's side, at the settings of the comparison and its own defaults elsewhere."""
    from datasets import Dataset

    score = sentiment()
    model = load_causal_lm(MODEL, dtype=torch.float32)
    tokenizer = load_tokenizer(model)
    arguments = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=ROLLOUTS,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        beta=0.0,
        max_steps=steps,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    return trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: score(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        callbacks=[callback],
    )


class TakingTurns(transformers.TrainerCallback):
    """Times each of TRL's steps, and takes one of rlkit's after it."""

    def __init__(self, ours: GRPOTrainer) -> None:
        self.ours = ours
        self.trl_s: list[float] = []
        self.rlkit_s: list[float] = []
        self.parts: dict[str, list[float]] = defaultdict(list)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trl_s.append(time.perf_counter() - self.began)
        began = time.perf_counter()
        result = self.ours.step()
        self.rlkit_s.append(time.perf_counter() - began)
        seconds: dict[str, float] = defaultdict(float)
        for span in result.spans:
            seconds[span.name] += span.duration_s
        for name, value in seconds.items():
            self.parts[name].append(value)
        print(f"  step {len(self.trl_s)}: TRL {self.trl_s[-1]:.2f} s, rlkit {self.rlkit_s[-1]:.2f} s", flush=True)


def main() -> None:
    """Prints both medians with their spread, the ratio, and where rlkit's time goes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps each; the first is left out as warm-up")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    turns = TakingTurns(rlkit_trainer())
    print(
        f"rlkit {rlkit.__version__}, trl {trl.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    with tempfile.TemporaryDirectory() as folder:
        trl_trainer(options.steps + 1, folder, turns).train()
    theirs, ours = turns.trl_s[1:], turns.rlkit_s[1:]
    print(f"\n| GRPO step, {ROLLOUTS} rollouts x {TOKENS} tokens | median s | min | max |\n|---|---|---|---|")
    for name, seconds in ((f"TRL {trl.__version__}", theirs), (f"rlkit {rlkit.__version__}", ours)):
        print(f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |")
    ratios = [b / a for a, b in zip(theirs, ours, strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"\nrlkit / TRL, step by step: median {statistics.median(ratios):.2f} ({spread})")
    print("\n| where rlkit's step goes | median s | share |\n|---|---|---|")
    whole = statistics.median(ours)
    for name, seconds in sorted(turns.parts.items(), key=lambda item: -statistics.median(item[1])):
        print(f"| {name} | {statistics.median(seconds[1:]):.3f} | {statistics.median(seconds[1:]) / whole:.0%} |")


if __name__ == "__main__":
    main()
