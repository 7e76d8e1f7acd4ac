"""The weights that are pushed to vLLM, against what transformers and peft say they are."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn

from rlkit.errors import GenerationError
from rlkit.generation.weights import checkpoint_weights
from tests.generation.models import CONFIGS, Recurrent, family_model
from tests.tiny import tiny_model


def collected(model: nn.Module) -> dict[str, torch.Tensor]:
    pairs = list(checkpoint_weights(model))
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_without_adapters_gives_its_state_dict_once_and_in_place(family: str) -> None:
    model = family_model(family)
    found, state = collected(model), model.state_dict()
    left_out = set(state) - set(found)
    assert left_out == ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    assert set(found) <= set(state)
    for name, tensor in found.items():
        assert tensor.data_ptr() == state[name].data_ptr()
        assert not tensor.requires_grad


def test_a_plain_module_works_too() -> None:
    model = Recurrent()
    assert set(collected(model)) == set(model.state_dict())


ADAPTERS: dict[str, peft.PeftConfig] = {
    "lora": peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    "rslora with bias": peft.LoraConfig(
        r=4, use_rslora=True, bias="lora_only", target_modules="all-linear", init_lora_weights=False
    ),
    "dora": peft.LoraConfig(r=4, use_dora=True, target_modules=["o_proj"], init_lora_weights=False),
    "embedding": peft.LoraConfig(r=4, target_modules=["embed_tokens", "v_proj"], init_lora_weights=False),
    "ia3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
}


def adapted(config: peft.PeftConfig, **changes: Any) -> Any:
    model = peft.get_peft_model(tiny_model(tie_word_embeddings=False, **changes), copy.deepcopy(config)).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_is_merged_as_peft_merges_it_and_the_model_stays(kind: str) -> None:
    model = adapted(ADAPTERS[kind])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = collected(model)
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    plain = tiny_model(tie_word_embeddings=False).state_dict()
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in found.items())
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not any(getattr(module, "merged", False) for module in model.modules())


def test_a_layer_trained_whole_replaces_the_one_it_was_copied_from() -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = adapted(config)
    found = collected(model)
    assert torch.equal(found["lm_head.weight"], model.base_model.model.lm_head.modules_to_save["default"].weight)
    assert not torch.equal(found["lm_head.weight"], model.base_model.model.lm_head.original_module.weight)
    assert set(found) == set(tiny_model(tie_word_embeddings=False).state_dict())


def test_an_adapter_on_a_tied_head_unties_it() -> None:
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    found = collected(model)
    delta = model.base_model.model.lm_head.get_delta_weight("default")
    torch.testing.assert_close(found["lm_head.weight"], found["model.embed_tokens.weight"] + delta)
    assert delta.abs().max() > 0


def test_adapters_that_are_off_or_merged_already_are_not_merged_again() -> None:
    model = adapted(ADAPTERS["lora"])
    plain, merged = tiny_model(tie_word_embeddings=False).state_dict(), collected(model)
    with model.disable_adapter():
        off = collected(model)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in off.items())
    model.merge_adapter()
    again = collected(model)
    assert all(torch.equal(tensor, again[name]) for name, tensor in merged.items())
    with model.disable_adapter():
        for name, tensor in collected(model).items():
            torch.testing.assert_close(tensor, plain[name], rtol=0, atol=1e-6)


def test_what_cannot_be_merged_is_named() -> None:
    model = adapted(ADAPTERS["lora"])

    def fail(**_: Any) -> None:
        raise ValueError("not this one")

    model.base_model.model.model.layers[1].self_attn.q_proj.merge = fail
    with pytest.raises(GenerationError, match=r"adapter of model\.layers\.1\.self_attn\.q_proj .* not this one"):
        collected(model)
