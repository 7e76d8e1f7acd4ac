"""Settings of vLLM's engine, for `TrainerConfig(generation="vllm", vllm={...})`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlkit.config_fields import Checked, fixed

__all__ = ["VllmConfig"]


@dataclass(frozen=True)
class VllmConfig(Checked):
    """How vLLM's engine is built. What is None is left to vLLM, but for `dtype` and `max_model_len`."""

    dtype: str | None = fixed(None)
    """Of the engine's weights and cache ("bfloat16", "float16", "float32"); None takes that of the actor's weights."""
    gpu_memory_utilization: float = fixed(0.3, above=0.0, high=1.0)
    """Share of the device's memory that the engine may take for weights, cache and work; the trainer needs the rest."""
    kv_cache_memory_bytes: int | None = fixed(None, low=1)
    """Bytes of the key-value cache, instead of what `gpu_memory_utilization` leaves."""
    max_model_len: int | None = fixed(None, low=1)
    """Most tokens of prompt and response together; None takes what the trainer's limits allow."""
    max_num_seqs: int | None = fixed(None, low=1)
    """Responses that are sampled at once."""
    max_num_batched_tokens: int | None = fixed(None, low=1)
    """Tokens in one forward pass of the engine."""
    attention_backend: str | None = fixed(None)
    """vLLM's attention kernels, such as "FLASH_ATTN"."""
    enforce_eager: bool = fixed(False)
    """Leave out compilation and CUDA graphs: starts sooner and samples slower."""
    sleep: bool = fixed(True)
    """Give up the engine's memory while the trainer learns (on a GPU)."""
    engine_args: dict[str, Any] | None = fixed(None)
    """Further arguments of `vllm.LLM`, passed on as they are; vLLM refuses those it does not know."""

    def arguments(self, **defaults: Any) -> dict[str, Any]:
        """Arguments of `vllm.LLM`: those set here, then `defaults` for the ones that are None."""
        named = {name: value for name, value in self.to_dict().items() if name not in ("sleep", "engine_args")}
        filled = {name: defaults.get(name) if value is None else value for name, value in named.items()}
        return {name: value for name, value in filled.items() if value is not None} | (self.engine_args or {})
