"""The rotary kernel beside the plain operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlkit.kernels.rotary import rotated
from tests.kernels.device import CLOSE, DEVICE, needs_kernels

pytestmark = needs_kernels


def plainly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", [(7, 14, 64), (5, 2, 80), (1, 1, 8), (0, 4, 16)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_rotation_and_its_gradient(dtype: torch.dtype, shape: tuple[int, int, int], transposed: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    rows, _, width = shape
    x = torch.randn(shape, generator=rng).to(dtype).to(DEVICE)
    if transposed:  # heads lie outside, as after a projection that was transposed
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    angle = torch.randn(rows, width, generator=rng)  # halves that differ
    cos, sin = angle.cos().to(dtype).to(DEVICE), angle.sin().to(dtype).to(DEVICE)
    pull = torch.randn(shape, generator=rng).to(dtype).to(DEVICE)
    own, wide = x.detach().requires_grad_(), x.detach().float().requires_grad_()
    out, wanted = rotated(own, cos, sin), plainly(wide, cos.float(), sin.float())
    close = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
    torch.testing.assert_close(out.float(), wanted, **close)
    assert out.is_contiguous()
    (found,) = torch.autograd.grad(out, own, pull)
    (expected,) = torch.autograd.grad(wanted, wide, pull.float())
    torch.testing.assert_close(found.float(), expected, **close)
