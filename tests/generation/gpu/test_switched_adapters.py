"""Graphs hold the adapters that were in force when they were captured; a switch of these drops them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from rlkit.engines.forward import cache_argument
from rlkit.generation.base import SamplingParams
from rlkit.generation.gpu.graphed import GraphedDecoder
from rlkit.generation.native import NativeGenerator
from tests.generation.models import family_model, prompts


def adapted(seed: int = 0) -> Any:
    """A model with two adapters that both change it."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(family_model("llama"), config, adapter_name="first")
    model.add_adapter("second", config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()


def scaled(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.set_scale("first", 3.0)


SWITCHES: dict[str, Callable[[Any], object]] = {
    "another": lambda model: model.set_adapter("second"),
    "off": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "scaled": scaled,
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_of_adapters_makes_the_step_anew(switch: str) -> None:
    """On a GPU, where steps are graphs, the responses would be those of the old adapter; elsewhere the step tells."""
    model, (ids, mask) = adapted(), prompts()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids, mask = model.to(device), ids.to(device), mask.to(device)
    decoder = GraphedDecoder(model, cache_argument(model.get_base_model()) or "", 2)
    params, numbers = SamplingParams(8, temperature=0.0), torch.zeros(len(ids), 8, dtype=torch.float64, device=device)
    with torch.no_grad():
        decoder.generate(ids, mask, params, numbers)
        step = decoder.step
        decoder.generate(ids, mask, params, numbers)
        assert decoder.step is step
        SWITCHES[switch](model)
        after = decoder.generate(ids, mask, params, numbers)
    fresh = NativeGenerator(model, 2).generate(ids, mask, params, torch.Generator())
    assert decoder.step is not step
    assert torch.equal(after.generated_ids, fresh.generated_ids)
