"""vLLM 0.26 to 0.32 in words that do not change with its version. No other file knows what vLLM's names are.

The engine runs in this process, so the trainer's weights reach it by reference: a weight-transfer engine of our own,
registered with vLLM's (`vllm.distributed.weight_transfer`), loads the trainer's tensors where they lie, and vLLM's
layerwise reload copies them into its own, on the device. CUDA IPC, which vLLM offers for this, opens the memory of
another process and cannot open that of its own; NCCL and IPC are for engines on devices or in processes of their own.
"""

import contextlib
import gc
import random
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.env import let_vllm_run_in_process
from rlkit.errors import GenerationError
from rlkit.generation.base import SamplingParams

__all__ = ["COLDEST", "Engine", "Response", "open_engine"]

COLDEST = 0.01
"""Lowest temperature above 0 that vLLM samples at; it raises lower ones to this."""
_TRANSFER = "rlkit-same-process"


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

    @property
    def context(self) -> int:
        """Most tokens that a prompt and its response may have together."""
        return int(self._llm.llm_engine.model_config.max_model_len)

    def push(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads a whole checkpoint (names, tensors) into the engine's model and forgets the prefix cache.

        Raises:
            GenerationError: the prefix cache is in use.
        """
        if not self._transfer_ready:
            self._llm.init_weight_transfer_engine({"init_info": {}})
            self._transfer_ready = True
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"weights": weights}})
        self._llm.finish_weight_update()
        if not self._llm.reset_prefix_cache():
            raise GenerationError(
                "vLLM's prefix cache could not be emptied after the weights changed, since requests still use it; "
                "no other generation may run on this engine meanwhile"
            )

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
        names = self._llm.enqueue([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
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
        """Ends the engine and gives back its memory."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
        if self._own_group:
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
        GenerationError: vLLM is not installed or is none of the versions known here, it computes on another kind of
            device than the trainer, or it refuses the model or an argument.
    """
    module = _import()
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
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
    fixed = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enable_sleep_mode": can_sleep,
        "weight_transfer_config": {"backend": _register_transfer()},
        "disable_log_stats": True,
    }
    if taken := sorted(set(fixed) & set(arguments)):
        raise GenerationError(f"rlkit sets {', '.join(taken)} of vLLM itself; leave them out of engine_args")
    own_group = not torch.distributed.is_initialized()
    try:
        with _process_state_kept(), _out_of_sight("llvmlite.binding.ffi"):
            llm = module.LLM(**fixed, **arguments)
    except Exception as error:
        raise GenerationError(f"vLLM {module.__version__} cannot serve this model: {error}") from error
    return Engine(llm, module, can_sleep=can_sleep, own_group=own_group)


@contextlib.contextmanager
def _out_of_sight(name: str) -> Iterator[None]:
    """A loaded module left out of `sys.modules`: vLLM 0.32 reads `vars` of all that modules hold, which llvmlite's
    library object answers with something that is no dictionary."""
    held = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if held is not None:
            sys.modules[name] = held


def _import() -> Any:
    let_vllm_run_in_process()
    try:
        import vllm
        from vllm.distributed.weight_transfer import WeightTransferEngine  # noqa: F401  (what older versions lack)
    except ImportError as error:
        raise GenerationError(
            f"generation='vllm' needs vLLM 0.26 or newer, which cannot be imported here ({error}); "
            "pip install 'rlkit-lab[gpu]', or take generation='native'"
        ) from error
    return vllm


def _response(row: int, completion: Any, greedy: bool) -> Response:
    """From one of vLLM's completions; with `flat_logprobs` there is one number a token."""
    tokens, reason = list(completion.token_ids), completion.finish_reason
    if reason not in ("stop", "length"):
        raise GenerationError(f"vLLM ended the response to row {row} with {reason!r}; expected 'stop' or 'length'")
    logprobs = [0.0] * len(tokens) if greedy else list(completion.logprobs.logprobs)
    if len(logprobs) != len(tokens):
        raise GenerationError(f"vLLM gave {len(logprobs)} log-probs for the {len(tokens)} tokens of row {row}")
    return Response(tokens, logprobs, reason)


@cache
def _register_transfer() -> str:
    """Makes the transfer within this process known to vLLM; returns its name there."""
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
        """There is nobody to meet."""

    @dataclass
    class Weights(WeightTransferUpdateInfo):  # type: ignore[misc]
        weights: Iterable[tuple[str, Tensor]]

    class SameProcess(WeightTransferEngine):  # type: ignore[misc]
        """Loads tensors of this process, wherever they are."""

        init_info_cls = Nothing
        update_info_cls = Weights

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._expected = {name for name, _ in self.model.named_parameters()}

        def init_transfer_engine(self, init_info: Nothing) -> None:
            """Nothing to set up."""

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":  # which has nothing to wait for, and no such call
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: Weights) -> None:
            loaded = self.model.load_weights(update_info.weights)
            if loaded is not None and (missing := sorted(self._expected - set(loaded))):
                raise GenerationError(
                    f"the trainer's model has no weights for {len(missing)} of vLLM's parameters, first {missing[0]!r}"
                )

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            head: Any = getattr(self.model, "lm_head", None)
            if self.device.type == "cpu" and hasattr(head, "quant_method"):
                # A head tied to the embedding gets no weights of its own, but its packed copy must follow.
                head.quant_method.process_weights_after_loading(head)

        def shutdown(self) -> None:
            """Nothing is kept."""

        @staticmethod
        def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: Any) -> None:
            """As 0.26 has it: one update of `trainer_args["llm"]`, between its start and finish."""
            trainer_args["llm"].update_weights({"update_info": {"weights": iterator}})

    WeightTransferEngineFactory.register_engine(_TRANSFER, SameProcess)
    return _TRANSFER


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """Undoes what building an engine does to its process: seeds, torch.set_num_threads and what it has set."""
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
