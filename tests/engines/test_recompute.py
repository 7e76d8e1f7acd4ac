"""Activations that are computed again or moved away give the same gradients, and take less memory."""

from __future__ import annotations

import pytest
import torch

from rlkit.engines.budget import TokenBudget
from rlkit.engines.logprobs import response_scores
from rlkit.engines.recompute import Activations, activations
from rlkit.errors import ModelError
from tests.engines.test_logprobs import batch, groups
from tests.generation.models import Recurrent, family_model


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2"])  # packed; padded; with dropout
@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize("rows", [groups(0), batch()], ids=["groups", "no groups"])
def test_gradients_are_those_of_kept_activations(
    family: str, mode: Activations, rows: tuple[torch.Tensor, torch.Tensor, int]
) -> None:
    found = []
    for way in ("keep", mode):
        model = family_model(family)
        with activations(model, way):
            scores = response_scores(model, *rows)
        scores.logprobs.sum().backward()
        assert not any("forward" in module.__dict__ for module in model.modules())
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*found)


def test_recomputing_keeps_less() -> None:
    """Bytes kept a token, of a layer's inside against its input."""
    kept = {}
    for way in ("keep", "recompute"):
        model, budget = family_model("llama"), TokenBudget(dynamic=True)
        with budget.measured(1, torch.device("cpu")), activations(model, way):
            response_scores(model, *groups(0))
        kept[way] = budget.bytes_per_token
    assert kept["recompute"] is not None
    assert kept["keep"] is not None
    assert kept["recompute"] < 0.5 * kept["keep"]


def test_nothing_is_wrapped_without_gradients() -> None:
    model = family_model("llama")
    with torch.no_grad(), activations(model, "recompute"):
        assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_without_named_layers_is_refused() -> None:
    with (
        pytest.raises(ModelError, match=r"Recurrent does not\. Use 'keep' or 'offload'"),
        activations(Recurrent(), "recompute"),
    ):
        pass
