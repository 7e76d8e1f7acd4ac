"""Copying checkpoints straight into fused parameters, on plain modules; what vLLM does with it is in test_vllm.py."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from rlkit.generation.vllm.direct_copy import prove
from rlkit.generation.weights import Checkpoint, checkpoint_weights
from tests.generation.models import CONFIGS, family_model
from tests.generation.vllm.fused_engine import PACKED, Attention, Trained, engine_of, learn, proven, same
from tests.tiny import tiny_model


def test_a_later_checkpoint_lands_where_the_first_was_found() -> None:
    model = nn.Module()
    model.attn = Attention()
    weights, fused = Checkpoint(model), {"attn.qkv.weight": torch.zeros(10, 4), "attn.qkv.bias": torch.zeros(10)}
    for start, end, part in ((0, 6, model.attn.q), (6, 8, model.attn.k), (8, 10, model.attn.v)):
        fused["attn.qkv.weight"][start:end] = part.weight.detach()
        fused["attn.qkv.bias"][start:end] = part.bias.detach()
    direct = proven(fused, weights)
    with torch.no_grad():
        for value, part in ((1.0, model.attn.q), (2.0, model.attn.k), (3.0, model.attn.v)):
            part.weight.fill_(value)
            part.bias.fill_(-value)
    address = fused["attn.qkv.weight"].data_ptr()
    assert direct(weights)
    assert fused["attn.qkv.weight"].tolist() == [[1.0] * 4] * 6 + [[2.0] * 4] * 2 + [[3.0] * 4] * 2
    assert fused["attn.qkv.bias"].tolist() == [-1.0] * 6 + [-2.0] * 2 + [-3.0] * 2
    assert fused["attn.qkv.weight"].data_ptr() == address
    assert weights.nbytes == 4 * (10 * 4 + 10)


def test_a_tied_head_needs_no_copy_and_padded_rows_stay_zero() -> None:
    model = Trained()
    engine, weights = engine_of(model), Checkpoint(model)
    direct = proven(engine, weights)
    learn(model)
    engine["embed.weight"][5:] = float("nan")  # as memory is that an engine gave up and took back
    assert direct(weights)
    assert same(engine, engine_of(model))
    assert not engine["embed.weight"][5:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_engine_of_another_dtype_gets_rounded_weights(dtype: torch.dtype) -> None:
    model = Trained()
    engine, weights = {name: tensor.to(dtype) for name, tensor in engine_of(model).items()}, Checkpoint(model)
    direct = proven(engine, weights)
    learn(model)
    assert direct(weights)
    assert same(engine, {name: tensor.to(dtype) for name, tensor in engine_of(model).items()})


def test_weights_of_several_dtypes_and_odd_sizes_go_side_by_side() -> None:
    model = Trained().to(torch.bfloat16)
    model.norm.float()
    model.extra = nn.ParameterList([nn.Parameter(torch.randn(3, dtype=torch.bfloat16)), nn.Parameter(torch.randn(()))])
    engine = {name: tensor.clone() for name, tensor in checkpoint_weights(model)}
    engine["norm.weight"] = engine["norm.weight"].bfloat16()
    direct = proven(engine, Checkpoint(model))
    learn(model)
    assert direct(Checkpoint(model))
    assert same(engine, {name: tensor.to(engine[name].dtype) for name, tensor in checkpoint_weights(model)})


def without(engine: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in engine.items() if key != name}


def changed(engine: dict[str, Tensor], name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {**engine, name: tensor}


REFUSED: dict[str, Any] = {
    "a parameter that no weight explains": lambda e: changed(e, "scale", torch.ones(4)),
    "a weight that no parameter holds": lambda e: without(e, "norm.bias"),
    "a part of a fused layer that is missing": lambda e: changed(
        without(e, "attn.qkv.bias"), "gate_up.bias", e["norm.bias"]
    ),
    "parts in another order": lambda e: changed(e, "attn.qkv.weight", e["attn.qkv.weight"].flip(0)),
    "a packed weight": lambda e: changed(e, "attn.qkv.weight", torch.empty(0)),
    "a transposed weight": lambda e: changed(e, "attn.qkv.weight", e["attn.qkv.weight"].t().contiguous()),
    "rows that are not one after another": lambda e: changed(
        e, "attn.qkv.weight", e["attn.qkv.weight"].t().contiguous().t()
    ),
    "a scaled weight": lambda e: changed(e, "norm.weight", e["norm.weight"] * 2),
    "rounded to integers": lambda e: changed(e, "attn.qkv.weight", e["attn.qkv.weight"].to(torch.int8)),
    "padding with something in it": lambda e: changed(
        e, "embed.weight", e["embed.weight"] + torch.arange(8)[:, None] // 7
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_a_plain_copy_is_refused(why: str) -> None:
    model = Trained()
    learn(model)
    engine = engine_of(model)
    assert prove(engine, PACKED, Checkpoint(model)) is not None
    assert prove(REFUSED[why](engine), PACKED, Checkpoint(model)) is None


def test_nothing_is_proven_for_an_engine_that_does_not_fuse_as_its_names_say() -> None:
    assert prove(engine_of(Trained()), {}, Checkpoint(Trained())) is None


def test_the_weights_are_followed_wherever_they_move() -> None:
    model = Trained()
    engine, weights = engine_of(model), Checkpoint(model)
    direct = proven(engine, weights)
    assert direct(weights)
    first = weights.in_place()
    assert weights.in_place() is first  # nothing moved: the walk is kept

    learn(model, 2)
    assert weights.in_place() is first  # other values in the same place
    model.norm.weight.data = torch.full((4,), 5.0)  # the same parameter in other memory
    assert direct(weights)
    assert weights.in_place() is not first
    assert engine["norm.weight"].tolist() == [5.0] * 4
    model.attn.q.weight = nn.Parameter(torch.full((6, 4), 6.0))  # another parameter
    assert direct(weights)
    assert engine["attn.qkv.weight"][:6].eq(6.0).all()
    model.attn.k = nn.Linear(4, 2)  # another layer
    assert direct(weights)
    assert same(engine, engine_of(model))
    model.bfloat16()  # memory and dtype of everything
    learn(model, 3)
    assert direct(weights)
    assert same(engine, {name: tensor.float() for name, tensor in engine_of(model).items()})


def test_other_names_or_strides_are_noticed() -> None:
    model = nn.Sequential()
    model.add_module("a", nn.Linear(3, 3, bias=False))
    model.add_module("b", nn.Linear(3, 3, bias=False))
    weights = Checkpoint(model)
    first = weights.in_place()
    assert weights.in_place() is first
    a, b = model._modules.pop("a"), model._modules.pop("b")
    model._modules.update(b=a, a=b)  # the same layers in the same order under each other's names
    second = weights.in_place()
    assert second is not first
    model.b.weight.data = model.b.weight.data.t()  # the same memory and shape
    assert weights.in_place() is not second


def test_other_names_or_shapes_are_not_copied() -> None:
    model = Trained()
    engine, weights = engine_of(model), Checkpoint(model)
    direct = proven(engine, weights)
    model.head.weight = nn.Parameter(torch.randn(5, 4))  # untied: a weight more
    assert not direct(weights)
    model.head.weight = model.embed.weight
    assert direct(weights)
    model.norm.weight = nn.Parameter(torch.ones(1))  # a copy would spread it over all four
    assert not direct(weights)
    model.norm = nn.LayerNorm(4)
    model.norm.bias = None
    assert not direct(weights)


def adapted(seed: int = 0) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(seed)
    return peft.get_peft_model(tiny_model(), config)


def test_adapters_are_merged_one_weight_at_a_time() -> None:
    model = adapted()
    weights = Checkpoint(model)
    engine = {name: tensor.clone() for name, tensor in checkpoint_weights(model)}
    direct = proven(engine, weights)
    assert weights.in_place() is None
    learn(model)
    assert direct(weights)
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert same(engine, {name: merged[name] for name in engine})
    assert weights.nbytes == sum(4 * p.numel() for p in tiny_model().parameters())


def test_an_adapter_that_comes_later_is_noticed() -> None:
    model = tiny_model()
    weights = Checkpoint(model)
    engine = {name: tensor.clone() for name, tensor in checkpoint_weights(model)}
    direct = proven(engine, weights)
    assert direct(weights)
    grown = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    assert weights.in_place() is None  # the adapter's layers are in `model` itself
    assert direct(weights)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(engine[name], copy.deepcopy(grown).merge_and_unload().state_dict()[name])


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_in_place_are_those_of_a_walk(family: str) -> None:
    model = family_model(family)
    weights = Checkpoint(model)
    found, walked = weights.in_place(), list(weights)
    assert found is not None
    assert list(found.names) == [name for name, _ in walked]
    assert [t.data_ptr() for t in found.tensors] == [t.data_ptr() for _, t in walked]
    assert found.nbytes == weights.nbytes == sum(t.numel() * t.element_size() for _, t in walked)
