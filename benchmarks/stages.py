"""Where rlkit's step goes, stage by stage, and what some settings cost or save.

    python benchmarks/stages.py [--ways grpo ppo rows dynamic lengths adaptive] [--shape 0.5b] [--steps 3] ...

"grpo" and "ppo" are rlkit's sides of `step.py`, in passes of so many tokens; "rows" is GRPO in passes of a number of
rows, "dynamic" in passes sized by the free memory. "lengths" is GRPO on prompts of which a third is short, a third long
and the rest between, and "adaptive" the same with adaptive sampling: short ones greedily, long ones from the 50
likeliest tokens at temperature 0.7. "rollout" holds the controllers' stages, which may overlap, and "update" its own.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from shapes import device_of_machine, free_memory, header, prompts_of, spread, workload
from step import longest_first, rlkit_trainer, size_of, stages_of

WAYS = ("grpo", "ppo", "rows", "dynamic", "lengths", "adaptive")
SHORT, LONG = 0.25, 4.0
"""Lengths of short and long prompts, of that of the others."""


def trainer_of(way: str, options: argparse.Namespace, device: str) -> Any:
    """A trainer of that way."""
    given = argparse.Namespace(**vars(options), algorithm="ppo" if way == "ppo" else "grpo", generation="native")
    if way == "rows":
        return rlkit_trainer(given, device, micro_batch_tokens=None, micro_batch_size=options.micro)
    if way == "dynamic":
        return rlkit_trainer(given, device, micro_batch_tokens=None, use_dynamic_batching=True)
    if way not in ("lengths", "adaptive"):
        return rlkit_trainer(given, device)
    short, long = int(SHORT * options.prompt), int(LONG * options.prompt)
    third = options.groups // 3
    counts = ((third, short), (options.groups - 2 * third, options.prompt), (third, long))
    prompts = [prompt for count, length in counts for prompt in prompts_of(count, length)]
    changes: dict[str, Any] = {"max_prompt_length": long}
    if way == "adaptive":
        changes |= {"adaptive_sampling": True, "adaptive_short_prompt": short + 1, "adaptive_long_prompt": long - 1}
    return rlkit_trainer(given, device, prompts, **changes)


def main() -> None:
    """Prints the table."""
    parser = workload(__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=["grpo", "ppo"], choices=WAYS)
    parser.add_argument("--micro", type=int, default=32, help="rows of a pass, where rows are counted")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    device = device_of_machine()
    print(header())
    tokens = options.groups * options.group * options.response
    print(f"{size_of(options)}, {options.tokens:,} tokens a pass\n")
    print("| way, stage | s | spread | of the step | response tokens/s | peak GiB |\n|---|---|---|---|---|---|")
    for way in options.ways:
        seconds, memory, stages = stages_of(trainer_of(way, options, device), options.steps)
        whole = statistics.median(seconds)
        print(f"| {way} | {spread(seconds)} | | {tokens / whole:,.0f} | {memory:.1f} |", flush=True)
        for name, values in longest_first(stages):
            share = statistics.median(values) / whole
            print(f"|   {name} | {spread(values)} | {share:.0%} | | |", flush=True)
        free_memory()


if __name__ == "__main__":
    main()
