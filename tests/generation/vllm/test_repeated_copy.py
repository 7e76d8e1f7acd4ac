"""A repeated copy starts before the model is looked at: what it may read meanwhile, and what is right in the end."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from rlkit.errors import GenerationError
from rlkit.generation.vllm.direct_copy import DirectCopy
from rlkit.generation.weights import Checkpoint, checkpoint_weights
from tests.generation.vllm.fused_engine import Trained, engine_of, learn, proven, same
from tests.tiny import tiny_model


def in_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The sources of each call that copies, in order, as they were then."""
    calls: list[list[Tensor]] = []
    copy_all = torch._foreach_copy_

    def counted(targets: list[Tensor], sources: list[Tensor]) -> None:
        calls.append([source.clone() for source in sources])
        copy_all(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    return calls


def passes(calls: list[list[Tensor]]) -> int:
    """How often a `Trained` was copied: how many calls have its embedding, 80 bytes in words of 8."""
    return sum(source.numel() == 10 for call in calls for source in call)


def repeated(model: nn.Module, engine: dict[str, Tensor]) -> tuple[DirectCopy, Checkpoint]:
    """A direct copy that has been made before, so that the next one starts without a look at the model."""
    weights = Checkpoint(model)
    direct = proven(engine, weights)
    assert direct(weights)
    return direct, weights


def swapped(model: Trained) -> None:
    model.attn.k, model.attn.v = model.attn.v, model.attn.k


def transposed(model: Trained) -> None:
    model.attn.extra.data = model.attn.extra.data.t()


def another_view(model: Trained) -> None:
    both = model.attn.extra.data.view(-1)
    model.attn.extra.data, model.norm.weight.data = both[:4].view(2, 2), both[:4]


def other_memory(model: Trained) -> None:
    model.norm.weight.data = torch.full((4,), 9.0)


def another_parameter(model: Trained) -> None:
    model.attn.q.weight = nn.Parameter(torch.full((6, 4), 6.0))


@pytest.mark.parametrize("change", [swapped, transposed, another_view, other_memory, another_parameter])
def test_what_only_the_second_look_sees_is_right_in_the_end(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Trained()
    model.attn.extra = nn.Parameter(torch.arange(4.0).view(2, 2))
    learn(model)
    engine = {**engine_of(model), "attn.extra": model.attn.extra.detach().clone()}
    direct, weights = repeated(model, engine)
    calls = in_calls(monkeypatch)
    assert direct(weights)
    assert passes(calls) == 1
    learn(model, 2)
    change(model)
    expected = {**engine_of(model), "attn.extra": model.attn.extra.detach().clone()}
    assert direct(weights)
    assert passes(calls) == 3  # what had been found, and what is there
    assert same(engine, expected)
    assert direct(weights)
    assert passes(calls) == 4
    assert same(engine, expected)


def test_a_second_look_that_finds_another_shape_or_an_adapter_has_the_last_word() -> None:
    model = Trained()
    engine = engine_of(model)
    direct, weights = repeated(model, engine)
    model.attn.q.weight.data = model.attn.q.weight.data[:3]  # the same address
    assert not direct(weights)  # the engine has a part of older weights and is told so
    grown = tiny_model()
    engine = {name: tensor.clone() for name, tensor in checkpoint_weights(grown)}
    direct, weights = repeated(grown, engine)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    merged = copy.deepcopy(peft.get_peft_model(grown, config)).merge_and_unload().state_dict()
    assert direct(weights)
    assert same(engine, {name: merged[name] for name in engine})


@pytest.mark.parametrize("size", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_freed_memory_is_never_read(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Trained()
    engine = {name: tensor.to(dtype) for name, tensor in engine_of(model).items()}
    direct, weights = repeated(model, engine)
    learn(model)
    values = model.embed.weight.detach().clone()
    calls = in_calls(monkeypatch)
    model.embed.weight.untyped_storage().resize_(size)
    for _ in range(2):
        with pytest.raises(GenerationError, match=rf"'embed.weight' of shape \(5, 4\) needs 80 bytes .* has {size}"):
            direct(weights)
    assert calls == []
    model.embed.weight.untyped_storage().resize_(80)
    with torch.no_grad():
        model.embed.weight.copy_(values)
    assert direct(weights)
    assert same(engine, {name: tensor.to(dtype) for name, tensor in engine_of(model).items()})


def test_less_memory_at_the_same_address_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Trained()
    direct, weights = repeated(model, engine_of(model))
    address, size_of = model.embed.weight.data_ptr(), torch.UntypedStorage.nbytes

    def smaller(storage: torch.UntypedStorage) -> int:  # an allocator may give freed memory again, and decides when
        return 64 if storage.data_ptr() == address else size_of(storage)

    monkeypatch.setattr(torch.UntypedStorage, "nbytes", smaller)
    calls = in_calls(monkeypatch)
    with pytest.raises(GenerationError, match="needs 80 bytes of memory and has 64"):
        direct(weights)
    assert calls == []


def test_memory_that_the_model_has_left_is_read_at_most_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Trained()
    engine = engine_of(model)
    direct, weights = repeated(model, engine)
    before = model.norm.weight.detach().clone()
    model.norm.weight.data = torch.full((4,), 9.0)  # nothing but the copy now refers to the memory before
    calls = in_calls(monkeypatch)
    assert direct(weights)
    first, last = ([source for source in call if source.numel() in (2, 4)] for call in calls)
    assert any(torch.equal(source.view(torch.float32), before) for source in first)
    assert not any(torch.equal(source.view(torch.float32), before) for source in last)
    assert engine["norm.weight"].tolist() == [9.0] * 4


def test_long_lists_and_long_weights_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.generation.vllm.direct_copy._BLOCK", 4)
    monkeypatch.setattr("rlkit.generation.vllm.direct_copy._BLOCKS", 2)
    model = nn.ParameterDict({name: torch.randn(size) for name, size in (("_", 0), ("a", 22), ("b", 2), ("c", 3))})
    model["d"] = nn.Parameter(torch.randn(3, 5))  # of an odd size: not in words of 8 bytes, and in one piece
    engine = {name: tensor.clone() for name, tensor in checkpoint_weights(model)}
    direct, weights = repeated(model, engine)
    calls = in_calls(monkeypatch)
    learn(model)
    assert direct(weights)
    # Two blocks of four a call: "a" is 11 words of 8 bytes and "b" one; "c" and "d" stay floats.
    assert [[source.numel() for source in call] for call in calls] == [[0, 3], [15], [8], [3, 1]]
    assert same(engine, dict(model.named_parameters()))
