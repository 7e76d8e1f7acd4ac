"""The gate of a decoder's MLP, silu(gate) * up, and its gradient."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkit.kernels import on_device_of

__all__ = ["silu_times"]

_BLOCK = 2048

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _forward(gate, up, out, gate_stride, up_stride, width, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + column, x * tl.sigmoid(x) * y, mask=inside)

    @triton.jit
    def _backward(grad, gate, up, gate_grad, up_grad, gate_stride, up_stride, width, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        place = row * width + column
        pull = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(x)
        tl.store(up_grad + place, pull * x * share, mask=inside)
        tl.store(gate_grad + place, pull * y * share * (1.0 + x * (1.0 - share)), mask=inside)


class _SiluTimes(torch.autograd.Function):
    """Keeps the two factors; silu(gate) is computed again for the gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _product(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
        if len(gate):
            grad, width = grad.contiguous(), gate.shape[1]
            with on_device_of(gate):
                _backward[_grid(gate)](grad, gate, up, of_gate, of_up, gate.stride(0), up.stride(0), width, _BLOCK)
        return of_gate, of_up


def _product(gate: Tensor, up: Tensor) -> Tensor:
    rows, width = gate.shape
    out = gate.new_empty(gate.shape)
    if rows:
        with on_device_of(gate):
            _forward[_grid(gate)](gate, up, out, gate.stride(0), up.stride(0), width, _BLOCK)
    return out


def _grid(x: Tensor) -> tuple[int, int]:
    return x.shape[0], triton.cdiv(x.shape[1], _BLOCK)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, differentiable in both.

    Args:
        gate, up: (N, I) of one dtype.
    """
    gate, up = (x if x.stride(-1) == 1 else x.contiguous() for x in (gate, up))
    out: Tensor = _SiluTimes.apply(gate, up) if torch.is_grad_enabled() else _product(gate, up)
    return out
