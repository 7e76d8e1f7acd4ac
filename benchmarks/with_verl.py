"""verl's GRPO with vLLM on one GPU, in a process of its own: the side "verl" of `step.py`.

    python benchmarks/step.py --sides rlkit verl [--verl-path FOLDER] [--verl-log FILE] [--verl-set KEY=VALUE ...]

verl needs other versions of some packages than the other sides (`pip install "verl[vllm]==0.9.1"`; TRL 1.16 must not
be there), so it may live in a folder that `--verl-path` names. Without flash-attn it attends through SDPA, row by row.
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
    """The folders model and tokenizer, the prompts in prompts.parquet and the reward in reward.py."""
    model_of(options.shape, "cpu", torch.float32, options.layers).save_pretrained(folder / "model")
    tokenizer = tokenizer_of(end="w0")
    tokenizer.add_special_tokens({"additional_special_tokens": ["\n", "<|im_end|>"]})  # verl looks for them in Qwen2
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "tokenizer")  # beside Qwen2's configuration it would be read as Qwen2's own
    prompts = prompts_of(options.groups, options.prompt)
    columns = {
        "prompt": [[{"role": "user", "content": prompt}] for prompt in prompts],
        "data_source": ["words"] * len(prompts),
        "reward_model": [{"style": "rule", "ground_truth": ""}] * len(prompts),
        "extra_info": [{"index": index} for index in range(len(prompts))],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "prompts.parquet")
    (folder / "reward.py").write_text(inspect.getsource(distinct_words))


def settings(options: argparse.Namespace, folder: Path, flash_attention: bool) -> list[str]:
    """Arguments of `main_ppo`: what differs from verl's defaults.

    Log-probs of the rollout serve as the old ones, which saves a pass. No layer is recomputed; the reference is in bf16
    and takes twice the tokens of a pass, as it keeps no activations. Log-probs come from "fused kernels" (chunks of the
    head's product): without flash-attn verl else takes the log-softmax token by token.
    """
    attention, role = "flash_attention_2" if flash_attention else "sdpa", "actor_rollout_ref"
    rows = options.groups * options.group
    given = f"""
    algorithm.adv_estimator=grpo algorithm.rollout_correction.bypass_mode=True
    data.train_files={folder}/prompts.parquet data.val_files={folder}/prompts.parquet data.dataloader_num_workers=0
    data.train_batch_size={options.groups} data.max_prompt_length={options.prompt}
    data.max_response_length={options.response} {role}.model.enable_gradient_checkpointing=False
    {role}.model.path={folder}/model {role}.model.tokenizer_path={folder}/tokenizer
    +{role}.rollout.engine_kwargs.vllm.tokenizer={folder}/tokenizer
    {role}.model.use_remove_padding={flash_attention} +{role}.model.override_config.attn_implementation={attention}
    {role}.model.use_fused_kernels=True
    {role}.actor.optim.lr=1e-6 {role}.actor.ppo_mini_batch_size={options.groups}
    {role}.actor.use_dynamic_bsz=True {role}.actor.ppo_max_token_len_per_gpu={options.tokens}
    {role}.actor.use_kl_loss=True {role}.actor.kl_loss_coef=0.04
    {role}.ref.log_prob_max_token_len_per_gpu={2 * options.tokens} {role}.ref.fsdp_config.model_dtype=bfloat16
    {role}.rollout.name=vllm {role}.rollout.n={options.group} {role}.rollout.ignore_eos=True
    {role}.rollout.tensor_model_parallel_size=1 {role}.rollout.gpu_memory_utilization=0.4
    {role}.rollout.max_model_len={options.prompt + options.response} {role}.rollout.max_num_seqs={rows}
    reward.custom_reward_function.path={folder}/reward.py reward.custom_reward_function.name=distinct_words
    reward.num_workers=2 transfer_queue.backend.SimpleStorage.num_data_storage_units=2
    trainer.logger=[console,file] trainer.n_gpus_per_node=1 trainer.val_before_train=False trainer.resume_mode=disable
    trainer.total_epochs={options.steps + 1} trainer.total_training_steps={options.steps + 1}
    ray_kwargs.ray_init.num_cpus={max(os.cpu_count() or 1, 16)} +ray_kwargs.ray_init.num_gpus=1
    hydra.run.dir={folder}/output
    """
    return [*given.split(), *options.verl_set]


def modules_of(environment: dict[str, str]) -> set[str]:
    """Which of the modules that matter verl's process can import."""
    names = (*NEEDED, "flash_attn")
    code = f"import importlib.util as u; print(*(name for name in {names!r} if u.find_spec(name)))"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def parsed(lines: str, options: argparse.Namespace) -> tuple[list[float], float, dict[str, list[float]]]:
    """What verl's file logger wrote, a JSON object a step, as a side reports it; the first step is left out.

    Returns:
        seconds of each step, the peak in GiB of verl's trainer (vLLM is a process of its own), seconds of each stage.
    """
    steps = [json.loads(line)["data"] for line in lines.splitlines()][1:]
    sizes = {(step[f"prompt_length/{end}"], step[f"response_length/{end}"]) for step in steps for end in ("min", "max")}
    if sizes != {(options.prompt, options.response)}:
        raise RlkitError(f"verl's prompts and responses had {sizes} tokens, not {options.prompt, options.response}.")
    names = [key for key in steps[0] if key.startswith("timing_s/")]
    stages = {name.removeprefix("timing_s/"): [step[name] for step in steps] for name in names}
    return stages.pop("step"), max(step["actor/perf/max_memory_allocated_gb"] for step in steps), stages


def verl_side(options: argparse.Namespace, device: str) -> tuple[list[float], float, dict[str, list[float]]]:
    """verl's `main_ppo`: seconds of each step, the trainer's peak GiB, and seconds of each stage.

    Raises:
        RlkitError: verl is not installed, or stopped before the last step.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(folder / "steps.jsonl"), "HYDRA_FULL_ERROR": "1"}
        if options.verl_path is not None:
            environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, options.verl_path.split(os.pathsep)))
        found = modules_of(environment)
        if missing := [module for module in NEEDED if module not in found]:
            raise RlkitError(
                f'verl cannot run: {", ".join(missing)} not found. `pip install "verl[vllm]==0.9.1"`, or into a folder '
                "of its own (`pip install --target FOLDER ...`) and give --verl-path FOLDER."
            )
        write_inputs(options, folder)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings(options, folder, "flash_attn" in found)]
        log = options.verl_log or folder / "verl.log"
        with log.open("w") as output:
            code = subprocess.run(command, env=environment, cwd=folder, stdout=output, stderr=output).returncode
        steps = folder / "steps.jsonl"
        lines = steps.read_text() if steps.exists() else ""
        if len(lines.splitlines()) <= options.steps:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            raise RlkitError(
                f"verl stopped with code {code} after {len(lines.splitlines())} of {options.steps + 1} steps. "
                f"The end of what it printed (--verl-log keeps all of it):\n{tail}"
            )
        return parsed(lines, options)
