"""The training half of a step: tokens a second, model FLOPs utilisation and memory of one update on given rollouts.

    python benchmarks/train.py [--shape 0.5b] [--groups 64] [--group 8] [--prompt 128] [--response 512]
                               [--ways packed rows dynamic padded recompute plain compiled liger] [--ragged]
                               [--tokens 32768] [--layers N]

"packed" is what a trainer does, in passes of so many tokens; "rows" are passes of as many rows as have so many if
each is as long as the longest, "dynamic" passes sized by the free memory. "padded" runs the same batch padded, each
prompt once a row; "recompute" computes activations again. "plain" is packed with the family's modules as they are,
where rlkit puts single kernels in the place of some; "compiled" compiles each of those decoder layers, and "liger" puts
Liger's kernels in, where it is installed.
With `--ragged` responses are log-normal with mean 256, at most 1,024, and the table also gives the time that the real
tokens would take at the rate of full ones. Utilisation counts 6 operations for each weight and token and 12 for each
attended pair and width, of the tokens that go through the model, against the card's bf16 peak.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from shapes import (
    PEAK_FLOPS,
    causal_pairs,
    device_of_machine,
    free_memory,
    header,
    model_of,
    spread,
    timed,
    tokenizer_of,
    training_flops,
    workload,
)

from rlkit import ActorController, GRPOTrainer, ReferenceController, RolloutBatch
from rlkit.collate import DataCollector
from rlkit.engines import attention, logprobs
from rlkit.trainers.learner import Lesson

WAYS = ("packed", "rows", "dynamic", "padded", "recompute", "plain", "compiled", "liger")


def lengths_of(rows: int, response: int, ragged: bool) -> list[int]:
    """Response lengths: all the same, or log-normal with mean 256 and at most 1,024."""
    if not ragged:
        return [response] * rows
    draws = torch.empty(rows).log_normal_(5.255, 0.76, generator=torch.Generator().manual_seed(0))
    return [int(x) for x in draws.clamp(8, 1024)]


def rollouts(groups: int, group: int, prompt: int, lengths: list[int], device: str) -> RolloutBatch:
    """Random rollouts with everything that a GRPO loss with a KL term reads."""
    rng = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, 40_000, (groups, prompt), generator=rng).repeat_interleave(group, 0)
    answers = [torch.randint(1, 40_000, (length,), generator=rng).tolist() for length in lengths]
    fields: dict[str, Any] = DataCollector(0).collate(prompts.tolist(), answers)
    mask = fields["response_mask"]
    fields |= {"learn_mask": mask, "groups": torch.arange(groups).repeat_interleave(group)}
    fields["advantages"] = torch.randn(len(mask), 1, generator=rng) * mask
    for name in ("rollout_logprobs", "ref_logprobs"):
        fields[name] = -10.8 * mask.float()
    return RolloutBatch(fields).to(device)


@contextmanager
def way_of(name: str, model: Any) -> Iterator[None]:
    """A way of running the same update."""
    packs, fused_modules = logprobs.packs, attention.fused_modules
    family = sys.modules[type(model).__module__]
    before = dict(vars(family))  # Liger changes the family's file, for all models to come
    if name in ("plain", "compiled", "liger"):
        attention.fused_modules = lambda model: nullcontext()
    if name == "padded":
        logprobs.packs = lambda model: False
    elif name == "compiled":
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    elif name == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    try:
        yield
    finally:
        logprobs.packs, attention.fused_modules = packs, fused_modules
        vars(family).update(before)


def measure(
    name: str, options: argparse.Namespace, lengths: list[int], device: str
) -> tuple[list[float], float, float]:
    """Seconds of each update, peak GiB, and operations of one update."""
    model = model_of(options.shape, device, torch.float32, options.layers)
    settings: dict[str, Any] = {
        "batch_size": options.groups * options.group,
        "group_size": options.group,
        "max_new_tokens": max(lengths),
        "max_prompt_length": options.prompt,
        "kl_coef": 0.04,
        "kl_placement": "loss",
        "kl_estimator": "k3",
        "lr": 1e-6,
        "micro_batch_tokens": None if name in ("rows", "dynamic") else options.tokens,
        "micro_batch_size": options.tokens // (options.prompt + max(lengths)) if name == "rows" else None,
        "use_dynamic_batching": name == "dynamic",
        "activations": "recompute" if name == "recompute" else "keep",
    }
    tokenizer = tokenizer_of()
    actor = ActorController(model, tokenizer)
    reference = ReferenceController(actor)
    trainer = GRPOTrainer(actor, lambda responses: [0.0] * len(responses), reference, prompts=["w1"], config=settings)
    batch = rollouts(options.groups, options.group, options.prompt, lengths, device)
    lesson = Lesson(trainer.policy_objective(), batch)
    computed = sum(lengths) + options.prompt * options.groups - len(lengths)
    if name == "padded":
        computed = len(lengths) * (options.prompt + max(lengths))
    operations = training_flops(model, computed, causal_pairs([options.prompt] * len(lengths), lengths))
    with way_of(name, model):
        seconds, memory = timed(lambda: trainer.learner.learn([lesson], 0), options.repeats)
    return seconds, memory, operations


def main() -> None:
    """Prints the table."""
    parser = workload(__doc__.splitlines()[0])
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["packed", "padded", "recompute"], choices=WAYS)
    options = parser.parse_args()
    device = device_of_machine()
    print(header())
    lengths = lengths_of(options.groups * options.group, options.response, options.ragged)
    real = sum(lengths)
    print(
        f"{options.shape}, {options.groups} x {options.group}, prompt {options.prompt}, {real:,} response tokens, "
        f"longest {max(lengths)}, {options.tokens:,} tokens a pass\n"
    )
    print("| way | s an update | spread | response tokens/s | MFU | peak GiB |\n|---|---|---|---|---|---|")
    for name in options.ways:
        seconds, memory, operations = measure(name, options, lengths, device)
        median = statistics.median(seconds)
        print(
            f"| {name} | {spread(seconds)} | {real / median:,.0f} | {operations / median / PEAK_FLOPS:.2f} "
            f"| {memory:.1f} |",
            flush=True,
        )
        free_memory()
    if options.ragged:
        full = argparse.Namespace(**vars(options))
        seconds, *_ = measure("packed", full, [256] * len(lengths), device)
        at_full_rate = statistics.median(seconds) * real / (256 * len(lengths))
        print(f"\nall of length 256: {spread(seconds)} s; the real tokens at that rate: {at_full_rate:.3f} s")


if __name__ == "__main__":
    main()
