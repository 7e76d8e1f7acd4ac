"""A whole training step on one GPU: rlkit beside TRL and verl with colocated vLLM, and PPO written phase after phase.

    python benchmarks/step.py [--algorithm grpo] [--shape 0.5b] [--groups 64] [--group 8] [--prompt 128]
                              [--response 512] [--sides rlkit trl] [--steps 3] [--micro 32] [--tokens 32768]
    python benchmarks/step.py --sides rlkit verl [--verl-path FOLDER]
    python benchmarks/step.py --algorithm ppo --sides rlkit sequential

All sides do the same work in one run: random weights of Qwen2's shapes, prompts and responses of fixed length, a KL
reference, one update, float32 master weights with bf16 arithmetic. PPO has a critic and a reward model of the same
shape besides. Prints the least time that an H200 allows, median and spread of the steady state (the first step is left
out), response tokens a second, the peak of what the process allocated, and where rlkit's step goes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import transformers
from sequential import SequentialPPO
from shapes import (
    PEAK_FLOPS,
    causal_pairs,
    decoding_bound,
    device_of_machine,
    free_memory,
    header,
    model_of,
    prompts_of,
    spread,
    timed,
    tokenizer_of,
    training_flops,
    workload,
)
from with_verl import add_options, verl_side

from rlkit import ActorController, CriticController, GRPOTrainer, PPOTrainer, ReferenceController, RewardController


def distinct_words(responses: list[str]) -> list[float]:
    """Share of distinct words: a reward that costs next to nothing."""
    return [len(set(words)) / max(len(words), 1) for words in (text.split() for text in responses)]


def rlkit_trainer(options: argparse.Namespace, device: str, prompts: list[str] | None = None, **changes: Any) -> Any:
    """rlkit's side, at its defaults for a GPU but for the tokens of a pass.

    Args:
        prompts: None takes those that all sides have.
        changes: further settings.
    """
    tokenizer = tokenizer_of()

    def model() -> Any:
        return model_of(options.shape, device, torch.float32, options.layers)

    actor = ActorController(model(), tokenizer)
    settings: dict[str, Any] = {
        "batch_size": options.groups * options.group,
        "group_size": options.group,
        "max_new_tokens": options.response,
        "max_prompt_length": options.prompt,
        "micro_batch_tokens": options.tokens,
        "lr": 1e-6,
        "kl_coef": 0.04,
        "generation": options.generation,
        **changes,
    }
    prompts = prompts or prompts_of(options.groups, options.prompt)
    if options.algorithm == "grpo":
        return GRPOTrainer(actor, distinct_words, ReferenceController(actor), prompts=prompts, config=settings)
    critic = CriticController(model(), tokenizer)
    classifier = scorer(options, device)
    reward = RewardController(classifier, tokenizer, name="model", batch_size=options.micro)
    return PPOTrainer(
        actor,
        critic=critic,
        reward_model=reward,
        reference=ReferenceController(actor),
        prompts=prompts,
        config=settings,
    )


def scorer(options: argparse.Namespace, device: str) -> Any:
    """A sequence classifier of the shape with one output."""
    config = model_of(options.shape, "meta", None, options.layers).config
    config.num_labels = 1
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
        made = transformers.AutoModelForSequenceClassification.from_config(config)
        torch.set_default_dtype(torch.float32)
    return made.eval()


def rlkit_side(options: argparse.Namespace, device: str) -> tuple[list[float], float, dict[str, list[float]]]:
    """Seconds of each step, peak GiB, and seconds of each stage."""
    return stages_of(rlkit_trainer(options, device), options.steps)


def stages_of(trainer: Any, steps: int) -> tuple[list[float], float, dict[str, list[float]]]:
    """Seconds of each of a trainer's steps but the first, peak GiB, and seconds of each stage."""
    stages = defaultdict[str, list[float]](list)

    def step() -> None:
        seconds = defaultdict[str, float](float)
        for span in trainer.step().spans:
            seconds[span.name] += span.duration_s
        for name, value in seconds.items():
            stages[name].append(value)

    seconds, memory = timed(step, steps)
    return seconds, memory, {name: values[1:] for name, values in stages.items()}


class Clock(transformers.TrainerCallback):
    """Seconds of each of TRL's steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)
        if len(self.seconds) == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


def trl_side(options: argparse.Namespace, device: str) -> tuple[list[float], float, dict[str, list[float]]]:
    """TRL's GRPO with vLLM in the same process, on a GPU; with `generate` on the CPU."""
    import trl
    from datasets import Dataset

    rows, clock, on_gpu = options.groups * options.group, Clock(), device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        model_of(options.shape, "cpu", torch.float32, options.layers).save_pretrained(folder)
        tokenizer = tokenizer_of(end="w0")
        tokenizer.save_pretrained(folder)
        colocated = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": options.prompt + options.response,
            "generation_kwargs": {"ignore_eos": True, "min_tokens": options.response},
        }
        arguments = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=options.micro,
            gradient_accumulation_steps=rows // options.micro,
            num_generations=options.group,
            max_completion_length=options.response,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            beta=0.04,
            max_steps=options.steps + 1,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **(colocated if on_gpu else {}),
        )
        trainer = trl.GRPOTrainer(
            model=folder,
            reward_funcs=lambda completions, **_: distinct_words(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts_of(options.groups, options.prompt)}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return clock.seconds[1:], memory, {}


def sequential_side(options: argparse.Namespace, device: str) -> tuple[list[float], float, dict[str, list[float]]]:
    """PPO of `sequential.py`."""
    rows = options.groups * options.group
    ids = torch.randint(1, 40_000, (options.groups, options.prompt)).repeat_interleave(options.group, 0)
    ppo = SequentialPPO(options.shape, options.layers, ids[:rows], options.response, options.micro, device)
    ppo.step(8)
    phases = defaultdict[str, list[float]](list)

    def step() -> None:
        ppo.step()
        for name, value in ppo.seconds.items():
            phases[name].append(value)

    seconds, memory = timed(step, options.steps, warm_up=0)
    return seconds, memory, phases


SIDES: dict[str, Callable[[argparse.Namespace, str], tuple[list[float], float, dict[str, list[float]]]]] = {
    "rlkit": rlkit_side,
    "trl": trl_side,
    "verl": verl_side,
    "sequential": sequential_side,
}


def size_of(options: argparse.Namespace) -> str:
    """The size of a step, for the head of a table."""
    sizes = f"{options.groups} x {options.group}, prompt {options.prompt}, response {options.response}"
    return f"{options.shape}, {sizes}"


def longest_first(stages: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
    """Stages and their seconds, by the median."""
    return sorted(stages.items(), key=lambda item: -statistics.median(item[1]))


PEERS = {"grpo": ["trl", "verl"], "ppo": ["sequential"]}
"""Sides that know an algorithm, beside rlkit."""


def bounds(options: argparse.Namespace) -> tuple[float, float]:
    """Least seconds of a step on an H200: sampling, by what is read from memory, and the rest, by its operations.

    Of the rest only what no side can do without: a forward and backward pass of actor (and critic), and a forward pass
    of the reference (and of critic and reward model), over responses and each distinct prompt once.
    """
    rows, model = options.groups * options.group, model_of(options.shape, "meta", torch.bfloat16, options.layers)
    sampling = options.response * decoding_bound(model, rows, options.prompt, options.response)
    repeated = (rows - options.groups) * causal_pairs([options.prompt], [0])
    pairs = causal_pairs([options.prompt] * rows, [options.response] * rows) - repeated
    update = training_flops(model, rows * options.response + options.groups * options.prompt, pairs) / PEAK_FLOPS
    updates, forwards = (2, 3) if options.algorithm == "ppo" else (1, 1)
    return sampling, update * (updates + forwards / 3)


def main() -> None:
    """Prints the table."""
    parser = workload(__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="grpo", choices=["grpo", "ppo"])
    parser.add_argument("--micro", type=int, default=32, help="rows of a pass, on sides that count rows")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--generation", default="native")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), help="by default rlkit and one peer")
    add_options(parser)
    options = parser.parse_args()
    peers = PEERS[options.algorithm]
    options.sides = options.sides or ["rlkit", peers[0]]
    if odd := sorted(set(options.sides) - {"rlkit", *peers}):
        parser.error(f"{', '.join(odd)} would run another algorithm than {options.algorithm}; take {', '.join(peers)}")
    device = device_of_machine()
    print(header())
    tokens = options.groups * options.group * options.response
    print(f"{options.algorithm}, {size_of(options)}")
    sampling, rest = bounds(options)
    print(f"an H200 allows {sampling + rest:.2f} s: {sampling:.2f} of sampling, {rest:.2f} of scoring and learning\n")
    print("| side | s a step | spread | response tokens/s | peak GiB | rlkit is faster by |\n|---|---|---|---|---|---|")
    ours: float | None = None
    for side in options.sides:
        seconds, memory, stages = SIDES[side](options, device)
        median = statistics.median(seconds)
        ours = median if side == "rlkit" else ours
        times = f"{median / ours:.2f}" if ours else ""
        print(f"| {side} | {spread(seconds)} | {tokens / median:,.0f} | {memory:.1f} | {times} |", flush=True)
        for name, values in longest_first(stages):
            print(f"|   {name} | {spread(values)} | | | |")
        free_memory()


if __name__ == "__main__":
    main()
