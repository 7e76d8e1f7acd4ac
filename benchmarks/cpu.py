"""The CPU beside its peers, the same work in one run: generation against transformers, a GRPO step against TRL.

    python benchmarks/cpu.py [--tables generation step] [--turns 10] [--threads 2]

SmolLM2-135M-Instruct in fp32, 4 prompts x 4 responses of 24 tokens. A step is full fine-tuning with VADER sentiment, no
KL and one update. The two of a table take turns, so that a noisy machine troubles both alike; between them the
machine's rates are measured, a read of 512 MiB and a product of 1,536 x 1,536 matrices, from which the least possible
time follows: weights over memory bandwidth, operations over the cores' rate. Peak memory is the process's during a
turn, with all models loaded and the 0.5 GiB that is read. The step needs trl (`.[dev]`).
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from quickstart_learning import MODEL, PROMPTS, sentiment
from torch import nn

import rlkit
from rlkit import ActorController, GRPOTrainer
from rlkit.engines.models import load_causal_lm, load_tokenizer
from rlkit.generation.base import SamplingParams
from rlkit.generation.native import NativeGenerator

TOKENS, GROUP, ROLLOUTS, LR = 24, 4, 16, 2e-5


class Machine:
    """What the machine gives, measured again and again while others may use it too."""

    def __init__(self) -> None:
        self.bandwidths: list[float] = []  # bytes a second
        self.rates: list[float] = []  # floating-point operations a second
        self.large, self.square = torch.ones(1 << 27), torch.ones(1536, 1536)

    def measure(self) -> None:
        """One more sample of both rates."""
        self.bandwidths.append(self.large.nbytes / seconds_of(self.large.sum))
        self.rates.append(2 * 1536**3 / seconds_of(lambda: self.square @ self.square))

    def least(self, read: float, operations: float) -> tuple[float, float]:
        """Seconds for bytes and for operations, at the median rates."""
        return read / statistics.median(self.bandwidths), operations / statistics.median(self.rates)

    def __str__(self) -> str:
        parts = [
            f"{statistics.median(values) / 1e9:.1f} {unit} ({min(values) / 1e9:.1f} to {max(values) / 1e9:.1f})"
            for values, unit in ((self.bandwidths, "GB/s read"), (self.rates, "Gflop/s"))
        ]
        return ", ".join(parts)


class Turns:
    """Seconds and peak memory of each turn of one side; the first turn warms up and does not count."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.all_s: list[float] = []
        self.peaks: list[float] = []  # GiB

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self.began = time.perf_counter()

    def end(self) -> None:
        self.all_s.append(time.perf_counter() - self.began)
        status = Path("/proc/self/status").read_text()
        self.peaks.append(int(status.split("VmHWM:")[1].split()[0]) / 2**20)

    @property
    def seconds(self) -> list[float]:
        return self.all_s[1:]

    def row(self) -> str:
        seconds = self.seconds
        spread = f"{statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f}"
        return f"| {self.name} | {spread} | {max(self.peaks):.2f} |"


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def report(title: str, theirs: Turns, ours: Turns, machine: Machine, least: tuple[float, float]) -> None:
    """The table, the ratio turn by turn, and the least time."""
    print(f"\n| {title} | median s | min | max | peak GiB |\n|---|---|---|---|---|\n{theirs.row()}\n{ours.row()}")
    ratios = [a / b for a, b in zip(theirs.seconds, ours.seconds, strict=True)]
    print(f"\nFaster, turn by turn: {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f}).")
    print(f"Least s: {least[0]:.2f} for the bytes, {least[1]:.2f} for the operations, at {machine}.", flush=True)


def sizes(model: nn.Module, prompt_tokens: int) -> tuple[float, float, float, float]:
    """Bytes and operations of generation, then of training on what was generated.

    Generation reads the weights once a token; training reads and writes weights, gradients and both moments once, nine
    times the weights in all: the backward pass writes gradients, Adam reads four tensors and writes three, and the
    forward pass reads. Operations: 2 a weight of a product and a token, three times that with the backward pass.
    """
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    bytes_ = sum(p.nbytes for p in model.parameters())
    generated = 2.0 * weights * (prompt_tokens + ROLLOUTS * (TOKENS - 1))
    trained = 6.0 * weights * (prompt_tokens + ROLLOUTS * TOKENS)
    return bytes_ * TOKENS, generated, 9.0 * bytes_, trained


def generation(turns: int) -> None:
    """`NativeGenerator`, with log-probs, against transformers' `generate`, without."""
    model = load_causal_lm(MODEL, dtype=torch.float32).eval()
    encoded = load_tokenizer(model)(
        PROMPTS[: ROLLOUTS // GROUP], padding=True, padding_side="left", return_tensors="pt"
    )
    ids, mask = (encoded[name].repeat_interleave(GROUP, 0) for name in ("input_ids", "attention_mask"))
    native, rng = NativeGenerator(model), torch.Generator().manual_seed(0)

    def theirs() -> int:
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, temperature=1.0, max_new_tokens=TOKENS, eos_token_id=None
        )
        return int(out[:, ids.shape[1] :].numel())

    def ours() -> int:
        return int(native.generate(ids, mask.bool(), SamplingParams(TOKENS), rng).response_mask.sum())

    machine = Machine()
    sides = [(Turns(f"transformers {transformers.__version__}"), theirs), (Turns(f"rlkit {rlkit.__version__}"), ours)]
    for turn in range(turns + 1):
        for side, run in sides:
            side.begin()
            if run() != ROLLOUTS * TOKENS:
                raise RuntimeError(f"{side.name} stopped early, so the work is not the same")
            side.end()
            machine.measure()
        print("  turn", turn, ", ".join(f"{side.name}: {side.all_s[-1]:.2f} s" for side, _ in sides), flush=True)
    read, operations, *_ = sizes(model, int(mask[::GROUP].sum()))
    title = f"Generation, {ROLLOUTS} rows x {TOKENS} tokens"
    report(title, sides[0][0], sides[1][0], machine, machine.least(read, operations))


def rlkit_trainer() -> GRPOTrainer:
    """rlkit's side."""
    actor = ActorController(MODEL, dtype=torch.float32)
    config = {"batch_size": ROLLOUTS, "group_size": GROUP, "max_new_tokens": TOKENS, "lr": LR, "seed": 0}
    return GRPOTrainer(actor, {"sentiment": sentiment()}, prompts=PROMPTS, config=config)


def trl_trainer(steps: int, folder: str, callback: transformers.TrainerCallback) -> Any:
    """TRL's side, at the settings of the comparison and its own defaults elsewhere."""
    import trl
    from datasets import Dataset

    score = sentiment()
    model = load_causal_lm(MODEL, dtype=torch.float32)
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
        processing_class=load_tokenizer(model),
        reward_funcs=lambda completions, **_: score(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        callbacks=[callback],
    )


class TakingTurns(transformers.TrainerCallback):
    """Times each of TRL's steps, and takes one of rlkit's after it."""

    def __init__(self, ours: GRPOTrainer, theirs: Turns, machine: Machine) -> None:
        self.trainer, self.theirs, self.ours, self.machine = ours, theirs, Turns(f"rlkit {rlkit.__version__}"), machine
        self.parts: dict[str, list[float]] = defaultdict(list)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.theirs.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.theirs.end()
        self.machine.measure()
        self.ours.begin()
        result = self.trainer.step()
        self.ours.end()
        self.machine.measure()
        seconds: dict[str, float] = defaultdict(float)
        for span in result.spans:
            seconds[span.name] += span.duration_s
        for name, value in seconds.items():
            self.parts[name].append(value)
        print(
            f"  step {len(self.ours.all_s)}: TRL {self.theirs.all_s[-1]:.2f} s, rlkit {self.ours.all_s[-1]:.2f} s",
            flush=True,
        )


def step(turns: int) -> None:
    """A whole GRPO step against TRL's, and where rlkit's goes."""
    import trl

    trainer = rlkit_trainer()
    sides = TakingTurns(trainer, Turns(f"TRL {trl.__version__}"), Machine())
    with tempfile.TemporaryDirectory() as folder:
        trl_trainer(turns + 1, folder, sides).train()
    model = trainer.actor.model
    lengths = [len(ids) for ids in load_tokenizer(model)(PROMPTS)["input_ids"]]
    prompt_tokens = round(ROLLOUTS // GROUP * statistics.mean(lengths))
    read, operations, moved, trained = sizes(model, prompt_tokens)
    least = sides.machine.least(read + moved, operations + trained)
    report(f"GRPO step, {ROLLOUTS} rollouts x {TOKENS} tokens", sides.theirs, sides.ours, sides.machine, least)
    print("\n| where rlkit's step goes | median s | share |\n|---|---|---|")
    whole = statistics.median(sides.ours.seconds)
    for name, seconds in sorted(sides.parts.items(), key=lambda item: -statistics.median(item[1])):
        print(f"| {name} | {statistics.median(seconds[1:]):.3f} | {statistics.median(seconds[1:]) / whole:.0%} |")


def main() -> None:
    """Prints the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=["generation", "step"], choices=["generation", "step"])
    parser.add_argument("--turns", type=int, default=10, help="of each side; one more comes before, to warm up")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(
        f"rlkit {rlkit.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )
    for table in options.tables:
        {"generation": generation, "step": step}[table](options.turns)


if __name__ == "__main__":
    main()
