"""verl's GRPO with vLLM on one GPU, in a process of its own: the side "verl" of `step.py`.

    python benchmarks/step.py --sides rlkit verl [--verl-path FOLDER] [--verl-log FILE] [--verl-set KEY=VALUE ...]

verl needs other versions of some packages than the other sides (`pip install "verl[vllm]==0.9.1"`), so it may live in a
folder of its own that `--verl-path` names. Without flash-attn it attends through SDPA over rows of equal length.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from shapes import model_of, prompts_of, tokenizer_of

from rlkit.errors import RlkitError

NEEDED = ("verl", "vllm", "ray", "transfer_queue", "hydra", "tensordict", "torchdata", "codetiming")
"""Modules that verl's process imports for this run."""
KL_COEF, LEARNING_RATE, VLLM_MEMORY = 0.04, 1e-6, 0.4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this side."""
    parser.add_argument("--verl-path", default=None, help="PYTHONPATH of verl's process, where it is not this one's")
    parser.add_argument("--verl-log", type=Path, default=None, help="file that keeps what verl prints")
    parser.add_argument("--verl-set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of verl")


def distinct_words(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Share of distinct words, as verl calls a reward; its source is written to a file for verl."""
    words = solution_str.split()
    return len(set(words)) / max(len(words), 1)


def write_inputs(options: argparse.Namespace, folder: Path) -> None:
    """Model and tokenizer in `folder`/model, the prompts in prompts.parquet and the reward in reward.py."""
    model_of(options.shape, "cpu", torch.float32, options.layers).save_pretrained(folder / "model")
    tokenizer = tokenizer_of(end="w0")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(prompts_of(options.groups, options.prompt))
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "prompts.parquet")
    (folder / "reward.py").write_text(inspect.getsource(distinct_words))


def settings(options: argparse.Namespace, folder: Path, flash_attention: bool) -> dict[str, object]:
    """What differs from verl's defaults.

    Rollout log-probs serve as the old ones, which saves the pass that would compute them again. No layer is recomputed;
    the reference takes twice the tokens of a pass, as it keeps no activations, and is in bf16.
    """
    actor, reference, rollout = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
    model = "actor_rollout_ref.model"
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": options.groups,
        "data.max_prompt_length": options.prompt,
        "data.max_response_length": options.response,
        "data.dataloader_num_workers": 0,
        f"{model}.path": folder / "model",
        f"{model}.enable_gradient_checkpointing": False,
        f"{model}.use_remove_padding": flash_attention,
        f"+{model}.override_config.attn_implementation": "flash_attention_2" if flash_attention else "sdpa",
        f"{actor}.optim.lr": LEARNING_RATE,
        f"{actor}.ppo_mini_batch_size": options.groups,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": options.tokens,
        f"{actor}.use_kl_loss": True,
        f"{actor}.kl_loss_coef": KL_COEF,
        f"{reference}.log_prob_max_token_len_per_gpu": 2 * options.tokens,
        f"{reference}.fsdp_config.model_dtype": "bfloat16",
        f"{rollout}.name": "vllm",
        f"{rollout}.n": options.group,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": VLLM_MEMORY,
        f"{rollout}.max_model_len": options.prompt + options.response,
        f"{rollout}.max_num_seqs": options.groups * options.group,
        f"{rollout}.ignore_eos": True,
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.custom_reward_function.name": distinct_words.__name__,
        "reward.num_workers": 2,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
        "trainer.logger": "[console,file]",
        "trainer.n_gpus_per_node": 1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.total_epochs": options.steps + 1,
        "trainer.total_training_steps": options.steps + 1,
        "ray_kwargs.ray_init.num_cpus": max(os.cpu_count() or 1, 16),
        "hydra.run.dir": folder / "hydra",
    }


def modules_of(environment: dict[str, str]) -> set[str]:
    """Which of the modules that matter verl's process can import."""
    names = (*NEEDED, "flash_attn")
    code = f"import importlib.util as u; print(*(name for name in {names!r} if u.find_spec(name)))"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def parsed(lines: str) -> tuple[list[float], float, dict[str, list[float]]]:
    """What verl's file logger wrote, a JSON object a step, as a side reports it; the first step is left out.

    Returns:
        seconds of each step, the peak in GiB of verl's trainer (vLLM is a process of its own), seconds of each stage.
    """
    steps = [json.loads(line)["data"] for line in lines.splitlines()][1:]
    seconds = [step["timing_s/step"] for step in steps]
    names = sorted({key for step in steps for key in step if key.startswith("timing_s/")} - {"timing_s/step"})
    stages = {name.removeprefix("timing_s/"): [step[name] for step in steps if name in step] for name in names}
    return seconds, max((step["actor/perf/max_memory_allocated_gb"] for step in steps), default=0.0), stages


def verl_side(options: argparse.Namespace, device: str) -> tuple[list[float], float, dict[str, list[float]]]:
    """verl's `main_ppo`: seconds of each step, the trainer's peak GiB, and seconds of each stage.

    Raises:
        RlkitError: verl is not installed, or stopped before the last step.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(folder / "steps.jsonl"), "HYDRA_FULL_ERROR": "1"}
        if options.verl_path is not None:
            environment["PYTHONPATH"] = options.verl_path
        found = modules_of(environment)
        if missing := [module for module in NEEDED if module not in found]:
            raise RlkitError(
                f'verl cannot run: {", ".join(missing)} not found. `pip install "verl[vllm]==0.9.1"`, or install it '
                "into a folder of its own (`pip install --target FOLDER ...`) and give --verl-path FOLDER."
            )
        write_inputs(options, folder)
        pairs = [f"{key}={value}" for key, value in settings(options, folder, "flash_attn" in found).items()]
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *pairs, *options.verl_set]
        log = options.verl_log or folder / "verl.log"
        with log.open("w") as output:
            code = subprocess.run(command, env=environment, cwd=folder, stdout=output, stderr=output).returncode
        steps = folder / "steps.jsonl"
        lines = steps.read_text() if steps.exists() else ""
        if code or len(lines.splitlines()) <= options.steps:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            raise RlkitError(
                f"verl stopped with code {code} after {len(lines.splitlines())} of {options.steps + 1} steps. "
                f"The end of what it printed (--verl-log keeps all of it):\n{tail}"
            )
        return parsed(lines)
