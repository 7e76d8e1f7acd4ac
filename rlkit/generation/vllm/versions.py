"""vLLM 0.26 to 0.32 in words that do not change with its version.

With `transfer` (weights) and `process` (what is shared with the trainer) it is all that knows them.

The engine runs in this process, so the trainer's weights reach it by reference: a weight-transfer engine of our own,
registered with vLLM's (`vllm.distributed.weight_transfer`), copies the trainer's tensors from where they lie into the
engine's, on the device. CUDA IPC, which vLLM offers for this, opens the memory of another process and cannot open that
of its own; NCCL and IPC are for engines on devices or in processes of their own.
"""

import contextlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit.env import let_vllm_run_in_process
from rlkit.errors import GenerationError
from rlkit.generation.base import SamplingParams
from rlkit.generation.vllm.process import (
    close_llm,
    forget_shared_layers,
    out_of_sight,
    process_state_kept,
    require_no_other_sleeper,
)
from rlkit.generation.vllm.transfer import copied_directly, register_transfer, update_ended

__all__ = ["COLDEST", "Engine", "Response", "open_engine"]

COLDEST = 0.01
"""Lowest temperature above 0 that vLLM samples at; it raises lower ones to this."""


@dataclass(frozen=True)
class Response:
    """What was sampled for one prompt."""

    tokens: list[int]
    """(T,) ids, the stop token included."""
    logprobs: list[float]
    """(T,) log-probs of the distribution that was sampled from; all 0 where the most likely token was taken."""
    finish_reason: str
    """"stop" or "length"."""


class Engine:
    """One engine of vLLM.

    Args:
        llm: a `vllm.LLM` whose engine runs in this process.
        module: the module `vllm`.
        can_sleep: whether the engine was built to give up its memory.
        own_group: whether torch's process group came with the engine, and goes with it.
    """

    def __init__(self, llm: Any, module: Any, *, can_sleep: bool, own_group: bool) -> None:
        self._llm, self._vllm, self.can_sleep, self._own_group = llm, module, can_sleep, own_group
        self._asleep: list[str] = []
        self._transfer_ready = False
        self._pushes = 0

    @property
    def context(self) -> int:
        """Most tokens that a prompt and its response may have together."""
        return int(self._llm.llm_engine.model_config.max_model_len)

    @property
    def copied_directly(self) -> bool:
        """Whether the last weights were copied straight into the engine's, without its loaders."""
        return copied_directly(self._llm)

    def push(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads a whole checkpoint (names, tensors) into the engine's model.

        What the prefix cache holds belongs to older weights and is not looked at again: every push begins a new salt,
        which is part of what a cached block is found by. Emptying the cache instead would visit each of its blocks,
        hundreds of thousands on a large GPU, which takes longer than copying the weights.

        Args:
            weights: a `rlkit.generation.weights.Checkpoint`, or other pairs, which are loaded in vLLM's own way.

        Raises:
            GenerationError: requests are running.
        """
        if self._llm.llm_engine.has_unfinished_requests():
            raise GenerationError(
                "the weights of a vLLM engine cannot change while it still works on requests, whose keys and values "
                "are those of the old weights; no other generation may run on this engine meanwhile"
            )
        if not self._transfer_ready:
            self._llm.init_weight_transfer_engine({"init_info": {}})
            self._transfer_ready = True
        self._pushes += 1
        with update_ended(self._llm):
            self._llm.start_weight_update()
            self._llm.update_weights({"update_info": {"weights": weights}})
            self._llm.finish_weight_update()

    def run(
        self, prompts: Sequence[list[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> Generator[list[tuple[int, Response]], None, None]:
        """Samples one response a prompt; yields the rows that finished together, in order of the rows.

        Args:
            prompts: token ids of each prompt.
            params: distribution and stopping.
            seeds: of each row's random numbers.
        """
        asked = [self._sampling(params, seed) for seed in seeds]
        engine, greedy = self._llm.llm_engine, params.temperature == 0
        salt = str(self._pushes)
        given = [{"prompt_token_ids": ids, "cache_salt": salt} for ids in prompts]
        names = self._llm.enqueue(given, asked, use_tqdm=False)
        # Requests are named "<counter>-<random>" within the engine and "<counter>" in its outputs.
        row_of = {str(name).split("-")[0]: row for row, name in enumerate(names)}
        try:
            while row_of:
                with torch.random.fork_rng([]):  # the CPU's sampler draws from it and then lets each row's seed decide
                    done = [output for output in engine.step() if output.finished]
                found = [(row_of.pop(str(output.request_id).split("-")[0]), output) for output in done]
                if found:
                    found.sort(key=lambda pair: pair[0])
                    yield [(row, _response(row, output.outputs[0], greedy)) for row, output in found]
                elif row_of and not engine.has_unfinished_requests():
                    raise GenerationError(f"vLLM gave no response to rows {sorted(row_of.values())[:8]}")
        finally:
            if row_of:
                engine.abort_request(list(row_of))

    def sleep(self) -> None:
        """Gives up weights and key-value cache; on the CPU vLLM has no such thing, and they stay."""
        if self.can_sleep and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = ["weights", "kv_cache"]

    def wake(self, part: str) -> None:
        """Takes back the memory of "weights" or "kv_cache", if it was given up."""
        if part in self._asleep:
            self._llm.wake_up(tags=[part])
            self._asleep.remove(part)

    def close(self) -> None:
        """Ends the engine and gives back its memory. A closed engine stays closed."""
        if self._llm is None:
            return
        with contextlib.suppress(Exception):  # memory that is not there cannot be given back: it is taken first
            for part in list(self._asleep):
                self.wake(part)
        llm, self._llm = self._llm, None
        try:
            close_llm(llm)
        finally:
            if self._own_group:
                from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

                cleanup_dist_env_and_memory()

    def _sampling(self, params: SamplingParams, seed: int) -> Any:
        greedy = params.temperature == 0
        return self._vllm.SamplingParams(
            temperature=params.temperature,
            top_p=1.0 if greedy else params.top_p,
            top_k=0 if greedy else params.top_k,
            max_tokens=params.max_new_tokens,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,  # the stop ids say it all
            seed=seed,
            logprobs=None if greedy else 0,
            flat_logprobs=not greedy,
            detokenize=False,
        )


def open_engine(folder: Path, device: torch.device, *, sleep: bool, arguments: dict[str, Any]) -> Engine:
    """Builds an engine with random weights from the folder of a model's configuration.

    Args:
        folder: holds config.json.
        device: where the trainer's model is.
        sleep: build it so that it can give up its memory (CUDA).
        arguments: of `vllm.LLM`, beyond those that this file sets.

    Raises:
        GenerationError: vLLM is not installed or older than 0.26, it computes on another kind of device than the
            trainer, or it refuses the model or an argument.
    """
    with process_state_kept():
        module, kind, transfer = _import()
    if kind != device.type:
        raise GenerationError(
            f"this build of vLLM computes on {kind or 'no device it can find'} and the actor's model is on {device}; "
            f"put the actor on {kind or 'a device of this build'}, or take generation='native'"
        )
    if device.index not in (None, 0):
        raise GenerationError(
            f"vLLM's engine takes the first GPU that this process sees, and the actor's model is on {device}; put the "
            "actor on cuda:0, or let CUDA_VISIBLE_DEVICES begin with its GPU"
        )
    can_sleep = sleep and device.type == "cuda"
    if can_sleep:
        require_no_other_sleeper()
    fixed = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enable_sleep_mode": can_sleep,
        "weight_transfer_config": {"backend": transfer},
        "disable_log_stats": True,
    }
    if taken := sorted(set(fixed) & set(arguments)):
        raise GenerationError(f"rlkit sets {', '.join(taken)} of vLLM itself; leave them out of engine_args")
    own_group = not torch.distributed.is_initialized()
    forget_shared_layers()
    try:
        with process_state_kept(), out_of_sight("llvmlite.binding.ffi"):
            # No variable holds the LLM: vLLM keeps a frame or two of the import of its parts, and with them this one's.
            return Engine(module.LLM(**fixed, **arguments), module, can_sleep=can_sleep, own_group=own_group)
    except Exception as error:
        raise GenerationError(f"vLLM {module.__version__} cannot serve this model: {error}") from error


def _import() -> tuple[Any, str, str]:
    """The module `vllm`, the kind of device that it computes on, and the name of the transfer of weights to it."""
    let_vllm_run_in_process()
    try:
        import vllm
        from vllm.distributed.weight_transfer import WeightTransferEngine  # noqa: F401  (what older versions lack)
    except ImportError as error:
        raise GenerationError(
            f"generation='vllm' needs vLLM 0.26 or newer, which cannot be imported here ({error}); "
            "pip install 'rlkit-lab[gpu]', or take generation='native'"
        ) from error
    from vllm.platforms import current_platform

    return vllm, str(current_platform.device_type), register_transfer()


def _response(row: int, completion: Any, greedy: bool) -> Response:
    """From one of vLLM's completions; with `flat_logprobs` there is one number a token."""
    tokens, reason = list(completion.token_ids), completion.finish_reason
    if reason not in ("stop", "length"):
        raise GenerationError(f"vLLM ended the response to row {row} with {reason!r}; expected 'stop' or 'length'")
    logprobs = [0.0] * len(tokens) if greedy else list(completion.logprobs.logprobs)
    if len(logprobs) != len(tokens):
        raise GenerationError(f"vLLM gave {len(logprobs)} log-probs for the {len(tokens)} tokens of row {row}")
    return Response(tokens, logprobs, reason)
