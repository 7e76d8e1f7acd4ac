"""What vLLM changes in the process that it shares with the trainer, and how the process gets it back."""

import contextlib
import gc
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.errors import GenerationError
from rlkit.generation.vllm.transfer import worker_of

__all__ = ["close_llm", "forget_shared_layers", "out_of_sight", "process_state_kept", "require_no_other_sleeper"]

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_ALLOCATORS: list[Any] = []
"""Allocators of closed engines. A block that outlived its engine would be freed through one, so they stay."""


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Undoes what importing vLLM and building an engine set for the whole process, the trainer included.

    Importing it for CUDA turns cuDNN's attention off; building an engine sets the precision of fp32 products, seeds
    the random generators, and on the CPU replaces `torch.set_num_threads`.
    """
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision, dtype = _precision(), torch.get_default_dtype()
    cuda: Any = torch.backends.cuda
    attention = {kind: getattr(cuda, f"{kind}_sdp_enabled")() for kind in _ATTENTION}
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if precision is not None and _precision() != precision:
            torch.set_float32_matmul_precision(precision)
        for kind, enabled in attention.items():
            getattr(cuda, f"enable_{kind}_sdp")(enabled)
        random.setstate(states[0])
        np.random.set_state(states[1])


def _precision() -> str | None:
    """Of fp32 products; None where it was set for one backend, which torch then refuses to give for all."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextlib.contextmanager
def out_of_sight(name: str) -> Iterator[None]:
    """A loaded module left out of `sys.modules`: vLLM 0.32 reads `vars` of all that modules hold, which llvmlite's
    library object answers with something that is no dictionary."""
    held = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if held is not None:
            sys.modules[name] = held


def require_no_other_sleeper() -> None:
    """For an engine that will sleep: a process has one such memory.

    Raises:
        GenerationError: another engine has it.
    """
    allocator = _sleeping_memory()
    if allocator is not None and (used := allocator.get_current_usage()):
        raise GenerationError(
            f"another vLLM engine that sleeps lives in this process and holds {used / 2**20:,.0f} MiB, and vLLM can "
            "put one engine a process to sleep; release the other one first (trainer.close(), or generator.release()), "
            'or build this one with vllm={"sleep": False}'
        )


def forget_shared_layers() -> None:
    """Makes the next engine build layers of its own that vLLM would share between engines (rotary embeddings): what
    one engine puts to sleep or frees is then no part of another."""
    rotary = sys.modules.get("vllm.model_executor.layers.rotary_embedding")
    shared = getattr(rotary, "_ROPE_DICT", None)
    if isinstance(shared, dict):
        shared.clear()


def close_llm(llm: Any) -> None:
    """Ends a `vllm.LLM` of this process and gives back its memory, whatever still refers to it.

    A frame of a caught exception may refer to the engine or its model for as long as the process lives, so the parts
    are taken from each other, and what lies in the memory for sleeping is emptied.
    """
    worker, allocator = worker_of(llm), _sleeping_memory()
    # vLLM gives these pools up before the tensors in them are gone; held until then, they return every block.
    pools = list(getattr(allocator, "allocator_and_pools", {}).values())
    tensors = _tensors_of(worker) if allocator is not None else []
    engine = getattr(llm, "llm_engine", None)
    core = getattr(engine, "engine_core", None)
    try:
        if core is not None:
            core.shutdown()
    finally:
        if allocator is not None:
            _empty(tensors, allocator.pointer_to_data)
        tensors.clear()
        _take_apart(llm, engine, worker)
        del llm, engine, core, worker
        gc.collect()
        _ALLOCATORS.extend(allocator for _, allocator in pools)
        pools.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _sleeping_memory() -> Any:
    """vLLM's allocator of memory that can be given up; None where no engine has used it."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    return getattr(getattr(module, "CuMemAllocator", None), "instance", None)


def _tensors_of(worker: Any) -> list[Tensor]:
    """Weights, buffers and key-value caches of a worker."""
    runner = getattr(worker, "model_runner", None)
    model = getattr(runner, "model", None)
    found: list[Any] = [getattr(runner, "kv_caches", None)]
    if isinstance(model, torch.nn.Module):
        found += [*model.parameters(), *model.buffers(), *(getattr(m, "kv_cache", None) for m in model.modules())]
    tensors: list[Tensor] = []
    while found:
        each = found.pop()
        if isinstance(each, Tensor):
            tensors.append(each)
        elif isinstance(each, list | tuple):
            found.extend(each)
        elif isinstance(each, dict):
            found.extend(each.values())
    return tensors


def _empty(tensors: list[Tensor], blocks: dict[int, Any]) -> None:
    """Frees the memory of those tensors that lie in the memory for sleeping, and of no others."""
    spans = [(start, start + data.handle[1]) for start, data in blocks.items()]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if any(start <= storage.data_ptr() < end for start, end in spans):
            with contextlib.suppress(RuntimeError):
                storage.resize_(0)


def _take_apart(llm: Any, engine: Any, worker: Any) -> None:
    executor = getattr(engine, "model_executor", None)
    for part, names in (
        (worker, ("model_runner", "weight_transfer_engine")),
        (executor, ("driver_worker",)),
        (llm, ("llm_engine",)),
    ):
        for name in names:
            if hasattr(part, name):
                setattr(part, name, None)
