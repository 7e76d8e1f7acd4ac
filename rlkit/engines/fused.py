"""Norms and gates of decoder layers as one kernel each, for as long as a forward on a GPU lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from rlkit.engines.forward import device_of
from rlkit.kernels import available
from rlkit.kernels.gates import silu_times

__all__ = ["fused_modules"]

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")
_NORMS = {f"{family}RMSNorm" for family in _FAMILIES}
_MLPS = {f"{family}MLP" for family in _FAMILIES}


@contextmanager
def fused_modules(model: nn.Module) -> Iterator[None]:
    """Within it, the model's RMS norms and SiLU gates run as single kernels; its weights are read where they are.

    The kernels round once where the modules' own operations round in between, so that in half precision results differ
    by about that. On the CPU, and for modules of other families or with a forward of their own, nothing changes.
    """
    changed = []
    if available(device_of(model)):
        for module in model.modules():
            forward = _forward_of(module)
            if forward is not None and "forward" not in module.__dict__:
                module.forward = forward
                changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _forward_of(module: Any) -> Callable[[Tensor], Tensor] | None:
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    if kind.__name__ in _NORMS:
        return lambda x: _norm(module, x)
    if kind.__name__ in _MLPS and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
        return lambda x: _gated(module, x)
    return None


def _norm(module: Any, x: Tensor) -> Tensor:
    if x.dtype != module.weight.dtype:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _gated(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    product = silu_times(gate.flatten(0, -2), up.flatten(0, -2))
    return module.down_proj(product.view(gate.shape))  # type: ignore[no-any-return]
