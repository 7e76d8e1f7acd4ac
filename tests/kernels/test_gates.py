"""The gate's kernel beside the plain operations."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from rlkit.kernels.gates import silu_times
from tests.kernels.device import CLOSE, DEVICE, needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", [(3, 2501), (1, 16), (0, 8)], ids=str)
def test_gate_and_its_gradient(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(0)
    both = (2 * torch.randn(shape[0], 2 * shape[1], generator=rng)).to(dtype).to(DEVICE)
    pull = torch.randn(shape, generator=rng).to(dtype).to(DEVICE)
    gate, up = (part.detach().requires_grad_() for part in both.chunk(2, dim=-1))
    wide = [part.detach().float().requires_grad_() for part in (gate, up)]
    out, wanted = silu_times(gate, up), silu(wide[0]) * wide[1]
    close = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
    torch.testing.assert_close(out.float(), wanted, **close)
    found = torch.autograd.grad(out, (gate, up), pull)
    for one, other in zip(found, torch.autograd.grad(wanted, wide, pull.float()), strict=True):
        torch.testing.assert_close(one.float(), other, **close)
