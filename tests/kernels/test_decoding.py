"""The kernels of a decoding step beside the plain operations that they join."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.generation.base import SamplingParams
from rlkit.generation.sampling import sample
from rlkit.kernels import decoding
from tests.kernels.device import CLOSE, DEVICE, needs_kernels

pytestmark = needs_kernels
ROWS = 256 if DEVICE.type == "cuda" else 32  # an interpreted row takes 20 ms


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("width", [32, 576, 3584])
def test_sum_and_norm(dtype: torch.dtype, width: int) -> None:
    x, y, weight = (random(7, width, dtype=dtype, seed=i) for i in range(3))
    total, normed = decoding.add_rms_norm(x, y, weight[0], 1e-6)
    assert torch.equal(total, x + y)
    wanted = torch.nn.functional.rms_norm((x + y).float(), (width,), weight[0].float(), 1e-6)
    torch.testing.assert_close(normed.float(), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("vocabulary", [48, 1024, 5000])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampling_draws_the_same_tokens(vocabulary: int, temperature: float) -> None:
    from rlkit.generation.gpu.fused import sample_fused

    logits = 3 * random(ROWS, vocabulary)
    logits[:, 5] = float("-inf")
    logits[3] = float("-inf")
    logits[3, vocabulary - 1] = 0.0
    uniforms = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53])
    params = SamplingParams(1, temperature=temperature)
    tokens, logprobs = sample_fused(logits, params, uniforms)
    wanted, wanted_logprobs = sample(logits, params, uniforms)
    same = tokens == wanted
    assert int((~same).sum()) <= 2  # a number on the edge of two tokens may fall either way
    assert not bool((tokens == 5).any())
    exact = (logits / temperature).log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(logprobs, exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logprobs[same], wanted_logprobs[same], rtol=1e-4, atol=1e-4)


def test_sampling_follows_the_distribution() -> None:
    """Chi-square of draws over 8 tokens: below the 99.9th percentile of 7 degrees of freedom, 24.3."""
    from rlkit.generation.gpu.fused import sample_fused

    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -2.0, 0.2]]).to(DEVICE)
    draws = 100_000 if DEVICE.type == "cuda" else 1_000
    uniforms = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    tokens, _ = sample_fused(logits.expand(draws, -1).contiguous(), SamplingParams(1), uniforms)
    counts = torch.bincount(tokens, minlength=8).double()
    expected = draws * logits[0].double().softmax(-1)
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3


@pytest.mark.parametrize("slots", [3, 300])
def test_tokens_are_taken_in_as_plainly(slots: int) -> None:
    """Rows that go on, stop by their token, reach the limit, or did not run."""
    from rlkit.generation.gpu.fused import take_in_fused
    from rlkit.generation.gpu.slots import Buffers, take_in

    rng = torch.Generator().manual_seed(0)
    running = torch.rand(slots, generator=rng) < 0.7
    time = torch.randint(1, 4, (slots,), generator=rng) * running + ~running
    tokens, logprobs = torch.randint(0, 9, (slots,), generator=rng), torch.rand(slots, generator=rng)
    keeps, order = torch.rand(slots, generator=rng) < 0.8, torch.randperm(slots, generator=rng)

    def taken(how: Any) -> tuple[Buffers, list[Tensor]]:
        buffers = Buffers((1, 2, slots, 1, 9, 2), slots, steps=4, dtype=torch.float32, device=DEVICE)
        buffers.limit.fill_(4)
        rows = buffers.rows
        rows.clear(5, buffers.spare)
        rows.row.copy_(torch.where(running, order, buffers.spare))
        rows.place.copy_(4 + time)
        rows.running.copy_(running)
        how(buffers, rows, *(part.to(DEVICE) for part in (tokens, logprobs, keeps)))
        return buffers, [buffers.ids, buffers.logprobs, buffers.mask]

    buffers, found = taken(take_in_fused)
    plain, wanted = taken(take_in)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[:-1], other[:-1])
    assert int(found[2][:-1].sum()) == int(running.sum())
    for one, other in zip(buffers.rows.state, plain.rows.state, strict=True):
        assert torch.equal(one, other)
    assert 0 < int(buffers.rows.running.sum()) < int(running.sum()) or slots == 3
