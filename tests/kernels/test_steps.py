"""A decoder of fused steps beside the model's own forward: rows that share a prompt, wait, finish and move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlkit.engines.forward import cache_argument
from rlkit.generation.base import SamplingParams
from rlkit.generation.gpu import graphed
from rlkit.generation.gpu.graphed import GraphedDecoder
from rlkit.generation.gpu.slots import Rows
from rlkit.generation.gpu.steps import FusedStep
from tests.generation.models import family_model, teacher_forced
from tests.kernels.device import DEVICE, needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize(("family", "slots"), [("llama", None), ("llama-biased", 4), ("qwen3", 4)])
def test_fused_steps_sample_what_the_model_says(
    family: str, slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs of what was sampled, against a forward over the finished sequences."""
    for name in ("LOOK_EVERY", "ROW_STEP", "LEAD"):
        monkeypatch.setattr(graphed, name, 2)
    shared: list[int] = []
    share = Rows.share_prompts

    def watched(self: Rows, prompt_of: Tensor) -> None:
        share(self, prompt_of)
        shared.append(int((self.source != torch.arange(len(self), device=self.source.device)).sum()))

    monkeypatch.setattr(Rows, "share_prompts", watched)
    model = family_model(family).to(DEVICE)
    ids = torch.tensor([[0, 5, 6], [7, 8, 9], [0, 0, 4]]).repeat_interleave(3, 0).to(DEVICE)
    mask = ids != 0
    uniforms = torch.rand(9, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(DEVICE)
    decoder = GraphedDecoder(
        model, cache_argument(model) or "", 2, graphs=False, slots=slots
    )  # a graph cannot be watched
    assert isinstance(decoder.step, FusedStep)
    with torch.no_grad():
        made = decoder.generate(ids, mask, SamplingParams(7, stop_token_ids=tuple(range(2, 8))), uniforms)
    assert len(set(made.response_mask.sum(1).tolist())) > 2
    assert max(shared) >= 1
    found, wanted = (x * made.response_mask for x in (made.rollout_logprobs, teacher_forced(model, mask, made)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
