"""The rotary kernel beside the plain operations. It needs a CUDA GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlkit import kernels
from rlkit.kernels.rotary import rotated

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not kernels.available(torch.device("cuda")), reason="needs a GPU and Triton"
)
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def plainly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 14, 64), (5, 2, 80), (1, 1, 8), (0, 4, 16)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_rotation_and_its_gradient(dtype: torch.dtype, shape: tuple[int, int, int], transposed: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    rows, _, width = shape
    x = torch.randn(shape, generator=rng).to(dtype).cuda()
    if transposed:  # heads lie outside, as after a projection that was transposed
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    angle = torch.randn(rows, width, generator=rng)  # halves that differ
    cos, sin = angle.cos().to(dtype).cuda(), angle.sin().to(dtype).cuda()
    pull = torch.randn(shape, generator=rng).to(dtype).cuda()
    own, wide = x.detach().requires_grad_(), x.detach().float().requires_grad_()
    out, wanted = rotated(own, cos, sin), plainly(wide, cos.float(), sin.float())
    close = {"rtol": DTYPES[dtype], "atol": DTYPES[dtype]}
    torch.testing.assert_close(out.float(), wanted, **close)
    assert out.is_contiguous()
    (found,) = torch.autograd.grad(out, own, pull)
    (expected,) = torch.autograd.grad(wanted, wide, pull.float())
    torch.testing.assert_close(found.float(), expected, **close)
