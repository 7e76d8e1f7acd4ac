"""Log-probs, entropies and their gradients by kernel, beside those in slices of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.algorithms import distributions
from rlkit.algorithms.distributions import Sampled, logprobs_and_entropy, token_logprobs
from tests.kernels.device import DEVICE, needs_kernels

pytestmark = needs_kernels


def logits_of(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows with -inf in places, one with a single token left, one whose first block is -inf."""
    rng = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(9, width, generator=rng)
    ids = torch.randint(0, width, (9,), generator=rng)
    logits[0, 3] = logits[1] = logits[2, : width // 2 + 1] = float("-inf")
    logits[1, width - 1] = 0.5
    ids[:3] = torch.tensor([4, width - 1, width - 2])
    return logits.to(dtype).to(DEVICE), ids.to(DEVICE)


def results(logits: Tensor, ids: Tensor, temperature: float, kind: str) -> list[Tensor]:
    own = logits.detach().requires_grad_()
    pulls = torch.randn(2, len(ids), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    if kind == "log-probs":
        given: tuple[Tensor, ...] = (token_logprobs(own, ids, temperature),)
    elif kind == "entropy":
        given = (distributions.entropy(own, temperature),)
    else:
        given = logprobs_and_entropy(own, ids, temperature)
    (grad,) = torch.autograd.grad([*given], own, [*pulls[: len(given)]])
    return [*given, grad]


@pytest.mark.parametrize("kind", ["log-probs", "entropy", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "temperature"), [(48, 1.0), (4096, 0.7), (10_001, 1.3)])
def test_kernels_give_what_slices_give(
    width: int, temperature: float, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, ids = logits_of(width, dtype)
    found = results(logits, ids, temperature, kind)
    monkeypatch.setattr(distributions, "available", lambda device: False)
    wanted = results(logits, ids, temperature, kind)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(found[:-1], wanted[:-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)  # both add up in float32
    torch.testing.assert_close(found[-1], wanted[-1], rtol=bound, atol=bound)


def test_settings_that_are_alike_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids = logits_of(48, torch.float32)
    called: list[Any] = []
    scores = distributions.row_scores
    monkeypatch.setattr(distributions, "row_scores", lambda *given: called.append(given) or scores(*given))
    rows = torch.ones(9, device=DEVICE)
    token_logprobs(logits, ids, Sampled(rows, 0 * rows.long(), rows).alike())
    token_logprobs(logits, ids, Sampled(rows, 0 * rows.long(), rows))
    token_logprobs(logits, ids, Sampled(rows, 5 + 0 * rows.long(), rows).alike())  # cut off: in slices
    token_logprobs(logits, ids, Sampled(0 * rows, 0 * rows.long(), rows).alike())  # greedy: in slices
    assert len(called) == 2
