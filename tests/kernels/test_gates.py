"""The gate's kernel beside the plain operations. It needs a CUDA GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from rlkit import kernels
from rlkit.kernels.gates import silu_times

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not kernels.available(torch.device("cuda")), reason="needs a GPU and Triton"
)
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2501), (1, 16), (0, 8)], ids=str)
def test_gate_and_its_gradient(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(0)
    both = (2 * torch.randn(shape[0], 2 * shape[1], generator=rng)).to(dtype).cuda()
    pull = torch.randn(shape, generator=rng).to(dtype).cuda()
    gate, up = (part.detach().requires_grad_() for part in both.chunk(2, dim=-1))
    wide = [part.detach().float().requires_grad_() for part in (gate, up)]
    out, wanted = silu_times(gate, up), silu(wide[0]) * wide[1]
    close = {"rtol": DTYPES[dtype], "atol": DTYPES[dtype]}
    torch.testing.assert_close(out.float(), wanted, **close)
    found = torch.autograd.grad(out, (gate, up), pull)
    for one, other in zip(found, torch.autograd.grad(wanted, wide, pull.float()), strict=True):
        torch.testing.assert_close(one.float(), other, **close)
