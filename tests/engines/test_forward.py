"""Calling models: positions, what is passed on, where logits come from, modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlkit.engines.forward import (
    bare_model,
    call_logits,
    device_of,
    evaluation_mode,
    output_head,
    position_ids_from_mask,
)
from rlkit.errors import ModelError
from tests.tiny import tiny_model

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
MASK = torch.tensor([[False, True, True], [True, True, True]])


class Recorder(nn.Module):
    """Keeps what it was called with; subclasses say what it accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}
        self.output: Any = torch.zeros(2, 3, 4)


class WithMaskOnly(Recorder):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        self.seen = {"attention_mask": attention_mask}
        return self.output


class HandsOn(Recorder):
    def forward(self, input_ids: Tensor, **rest: Any) -> Any:
        self.seen = rest
        return self.output


def test_positions_count_attended_tokens() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    assert position_ids_from_mask(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 1, 1, 1]]
    assert position_ids_from_mask(mask.bool()).dtype == torch.int64


def test_only_what_a_forward_names_is_passed() -> None:
    model = WithMaskOnly()
    call_logits(model, IDS, MASK, use_cache=False, logits_to_keep=1)
    assert set(model.seen) == {"attention_mask"}


def test_a_wrapper_that_hands_everything_on_gets_everything() -> None:
    model = HandsOn()
    call_logits(model, IDS, MASK, use_cache=False)
    assert set(model.seen) == {"attention_mask", "position_ids", "use_cache"}
    assert model.seen["position_ids"].tolist() == [[0, 0, 1], [0, 1, 2]]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"logits": x}, lambda x: (x, "cache"), lambda x: Output(x)])
def test_logits_are_found_in_every_usual_output(wrap: Any) -> None:
    model = WithMaskOnly()
    logits = torch.randn(2, 3, 4)
    model.output = wrap(logits)
    assert call_logits(model, IDS, MASK) is logits


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@pytest.mark.parametrize("wrong", [None, {"scores": torch.zeros(2, 3, 4)}, torch.zeros(2, 4), "text"])
def test_an_output_without_logits_is_refused(wrong: Any) -> None:
    model = WithMaskOnly()
    model.output = wrong
    with pytest.raises(ModelError, match=r"WithMaskOnly.forward returned .*; expected logits of shape"):
        call_logits(model, IDS, MASK)


def test_the_output_head_is_found_through_adapters() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model()
    assert output_head(base) is base.lm_head
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert bare_model(adapted) is base
    assert output_head(adapted) is base.lm_head
    assert output_head(nn.Linear(2, 2)) is None
    assert bare_model(base) is base


def test_evaluation_mode_gives_every_module_its_mode_back_after_errors_too() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(1, 1)))
    model.train()
    model[1].eval()
    with evaluation_mode(model), evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, False, False]

    def fail() -> None:
        with evaluation_mode(model):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in model.modules()] == [True, True, False, False, False]


def test_a_module_without_parameters_is_on_the_cpu() -> None:
    assert device_of(nn.ReLU()) == torch.device("cpu")
    assert device_of(nn.Linear(1, 1, device="meta")) == torch.device("meta")
