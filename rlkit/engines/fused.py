"""Norms, gates and rotations of decoder layers as one kernel each, for as long as a forward on a GPU lasts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from rlkit.engines.families import gates_by_silu, is_one_of
from rlkit.engines.forward import device_of
from rlkit.kernels import available
from rlkit.kernels.gates import silu_times
from rlkit.kernels.rotary import rotated

__all__ = ["fused_modules"]

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")
_NORMS = {f"{family}RMSNorm" for family in _FAMILIES}
_MLPS = {f"{family}MLP" for family in _FAMILIES}
_ATTENTIONS = {f"{family}Attention" for family in _FAMILIES}


@contextmanager
def fused_modules(model: nn.Module) -> Iterator[None]:
    """Within it, the model's RMS norms, SiLU gates and rotations run as single kernels; weights are read in place.

    The kernels round once where the modules' own operations round in between, so that in half precision results differ
    by about that. On the CPU, and for modules of other families or with a forward of their own, nothing changes.
    Rotations are a function of the family's source file; other models of the family get the same from it meanwhile.
    """
    with ExitStack() as ends:
        if available(device_of(model)):
            files = set()
            for module in model.modules():
                if is_one_of(module, _ATTENTIONS):
                    files.add(type(module).__module__)
                forward = _forward_of(module)
                if forward is not None and "forward" not in module.__dict__:
                    module.forward = forward
                    ends.callback(module.__dict__.pop, "forward")
            for file in files:
                ends.callback(_Rotation(file).end)
        yield


def _forward_of(module: Any) -> Callable[[Tensor], Tensor] | None:
    if is_one_of(module, _NORMS):
        return lambda x: _norm(module, x)
    if is_one_of(module, _MLPS) and gates_by_silu(module):
        return lambda x: _gated(module, x)
    return None


def _norm(module: Any, x: Tensor) -> Tensor:
    if x.dtype != module.weight.dtype:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _gated(module: Any, x: Tensor) -> Tensor:
    if not available(x.device):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    gate, up = module.gate_proj(x), module.up_proj(x)
    product = silu_times(gate.flatten(0, -2), up.flatten(0, -2))
    return module.down_proj(product.view(gate.shape))  # type: ignore[no-any-return]


class _Rotation:
    """In a family's source file, in place of the function that rotates queries and keys."""

    name = "apply_rotary_pos_emb"

    def __init__(self, file: str) -> None:
        self.names = vars(sys.modules[file])
        self.plain = self.names[self.name]
        self.names[self.name] = self

    def end(self) -> None:
        self.names[self.name] = self.plain

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *further: Any, **named: Any) -> Any:
        """q (1, H, N, D) and k (1, K, N, D), rotated by cos and sin (1, N, D)."""
        packed = q.dim() == 4 and len(q) == len(cos) == 1 and cos.shape[-1] == q.shape[-1]
        if further or named or not packed or not available(q.device):
            return self.plain(q, k, cos, sin, *further, **named)
        return tuple(rotated(x[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1).unsqueeze(0) for x in (q, k))
