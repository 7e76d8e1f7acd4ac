"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of tokens laid end to end, and its gradient."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkit.kernels import on_device_of

__all__ = ["rotated"]

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _rotate(
        x, cos, sin, out, row_stride, head_stride, HEADS: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
        HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        head = tl.arange(0, HEAD_BLOCK)[:, None]
        low = tl.arange(0, BLOCK)[None, :]
        inside = (head < HEADS) & (low < HALF)
        source = x + row * row_stride + head * head_stride + low
        aim = out + (row * HEADS + head) * 2 * HALF + low
        angle = row * 2 * HALF + low
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        cos_first = tl.load(cos + angle, mask=low < HALF, other=0.0).to(tl.float32)
        cos_second = tl.load(cos + angle + HALF, mask=low < HALF, other=0.0).to(tl.float32)
        sin_first = tl.load(sin + angle, mask=low < HALF, other=0.0).to(tl.float32)
        sin_second = tl.load(sin + angle + HALF, mask=low < HALF, other=0.0).to(tl.float32)
        if BACK:
            tl.store(aim, first * cos_first + second * sin_second, mask=inside)
            tl.store(aim + HALF, second * cos_second - first * sin_first, mask=inside)
        else:
            tl.store(aim, first * cos_first - second * sin_first, mask=inside)
            tl.store(aim + HALF, second * cos_second + first * sin_second, mask=inside)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _launch(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _launch(grad, cos, sin, back=True), None, None


def _launch(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, heads, width = x.shape
    out = x.new_empty(x.shape)
    if rows:
        half = width // 2
        blocks = triton.next_power_of_2(heads), triton.next_power_of_2(half)
        with on_device_of(x):
            _rotate[(rows,)](x, cos, sin, out, x.stride(0), x.stride(1), heads, half, back, *blocks)
    return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + (x with its halves swapped, the first one negated) * sin, differentiable in x.

    Args:
        x: (N, H, D), D even.
        cos, sin: (N, D), of any floating-point dtype.

    Returns:
        (N, H, D), contiguous, in the dtype of x.
    """
    cos, sin = cos.contiguous(), sin.contiguous()
    out: Tensor = _Rotated.apply(x, cos, sin) if torch.is_grad_enabled() else _launch(x, cos, sin, back=False)
    return out
