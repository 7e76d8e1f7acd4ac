"""Fused norms and gates give what the modules give, and are gone after the forward."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from rlkit.engines import fused
from rlkit.engines.fused import fused_modules
from tests.generation.models import family_model

FAMILIES = ["llama", "llama-biased", "qwen2", "qwen3"]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuses on any device; where there is no GPU, the gate's kernel is its plain counterpart."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(fused, "available", lambda device: True)
        monkeypatch.setattr(fused, "silu_times", lambda gate, up: silu(gate) * up)
        monkeypatch.setattr(fused, "rotated", plainly_rotated)


def plainly_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)


def rotation_of(model: Any) -> Any:
    return vars(sys.modules[type(model.model.layers[0].self_attn).__module__])["apply_rotary_pos_emb"]


def model_of(family: str) -> Any:
    return family_model(family).to("cuda" if torch.cuda.is_available() else "cpu")


def logits_and_gradients(model: nn.Module) -> list[Tensor]:
    ids = torch.arange(10, device=next(model.parameters()).device).unsqueeze(0)
    logits = model(ids).logits
    return [logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))]


def changed(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_the_same(family: str, everywhere: None) -> None:
    model = model_of(family)
    wanted = logits_and_gradients(model)
    rotation = rotation_of(model)
    with fused_modules(model):
        names = changed(model)
        assert rotation_of(model) is not rotation
        with fused_modules(model):  # as when a layer is computed again
            pass
        found = logits_and_gradients(model)
        rows = model(torch.arange(10, device=model.device).view(2, 5)).logits
    assert rotation_of(model) is rotation
    assert any("RMSNorm" in name for name in names), names
    assert any("MLP" in name for name in names), names
    assert not changed(model)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows, model(torch.arange(10, device=model.device).view(2, 5)).logits)


def test_a_forward_of_its_own_stays(everywhere: None) -> None:
    model = model_of("llama")
    norm = model.model.norm
    own = norm.forward = lambda x: 0 * x
    with fused_modules(model):
        assert norm.forward is own
        assert not model(torch.ones(1, 2, dtype=torch.int64, device=norm.weight.device)).logits.any()
    assert norm.forward is own


def test_modules_are_as_they_were_after_an_error(everywhere: None) -> None:
    model = model_of("llama")
    with pytest.raises(RuntimeError, match="stop"), fused_modules(model):
        raise RuntimeError("stop")
    assert not changed(model)


def test_other_families_and_the_cpu_are_left_alone(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with fused_modules(plain := nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2))):
        assert not changed(plain)
    monkeypatch.undo()
    model = family_model("llama")
    with fused_modules(model):
        assert not changed(model)
