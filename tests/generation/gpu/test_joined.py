"""Layers joined in memory give what they give apart, and stay parameters like any other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlkit.generation.gpu.joined import Joined
from tests.generation.models import family_model


def layers_of(bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, out, bias=bias) for out in (8, 3, 5)]


def apart(layers: list[nn.Linear], x: Tensor) -> list[Tensor]:
    return [layer(x) for layer in layers]


def assert_equal(given: Any, wanted: list[Tensor]) -> None:
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_gives_what_each_layer_gives(bias: bool) -> None:
    layers, x = layers_of(bias), torch.randn(4, 6)
    before = [parameter.clone() for layer in layers for parameter in layer.parameters()]
    made = Joined(layers)
    assert made.weight is not None
    assert all(torch.equal(p, b) for p, b in zip((p for m in layers for p in m.parameters()), before, strict=True))
    assert_equal(made(x), apart(layers, x))


def test_training_goes_on_in_the_joined_memory() -> None:
    layers, x = layers_of(), torch.randn(4, 6)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    made = Joined(layers)
    twin = copy.deepcopy(layers)
    torch.cat(apart(layers, x), dim=-1).square().sum().backward()
    optimizer.step()
    assert_equal(made(x), apart(layers, x))
    assert not torch.equal(layers[0].weight, twin[0].weight)


def test_layers_that_lie_side_by_side_stay_where_they_are() -> None:
    layers = layers_of()
    Joined(layers)
    places = [layer.weight.data_ptr() for layer in layers]
    assert Joined(layers).weight is not None
    assert [layer.weight.data_ptr() for layer in layers] == places
    assert places[1] - places[0] == layers[0].weight.numel() * 4


def test_moved_layers_are_joined_anew() -> None:
    layers, x = layers_of(), torch.randn(4, 6)
    Joined(layers)
    for layer in layers:
        layer.double()
    assert_equal(Joined(layers)(x.double()), apart(layers, x.double()))


def test_what_cannot_be_joined_is_called() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    x = torch.randn(4, 6)
    for odd in (Scaled(6, 3), nn.Linear(6, 3, bias=False), nn.Sequential(nn.Linear(6, 3))):
        layers: list[Any] = [nn.Linear(6, 8), odd]
        made = Joined(layers)
        assert made.weight is None
        assert_equal(made(x), apart(layers, x))


def test_a_model_with_joined_layers_is_saved_and_copied_whole(tmp_path: Path) -> None:
    model = family_model("qwen2")
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layer in model.model.layers:
        assert Joined([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]).weight is not None
        assert Joined([layer.mlp.gate_proj, layer.mlp.up_proj]).weight is not None
    model.save_pretrained(tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model")
    for made in (again.state_dict(), copy.deepcopy(model).state_dict(), model.state_dict()):
        assert all(torch.equal(made[name], tensor) for name, tensor in wanted.items())
    assert not copy.deepcopy(model).model.layers[0].mlp.up_proj.weight._is_view()
    save_file({"up": model.model.layers[0].mlp.up_proj.weight.detach()}, tmp_path / "one")
    assert torch.equal(load_file(tmp_path / "one")["up"], wanted["model.layers.0.mlp.up_proj.weight"])


def test_layers_that_share_a_parameter_are_called() -> None:
    first, second = nn.Linear(6, 4), nn.Linear(6, 4)
    second.weight = first.weight
    assert Joined([first, second]).weight is None
    assert second.weight is first.weight


def test_a_parameter_that_two_groups_share_is_never_read_where_it_was() -> None:
    layers, x = layers_of(), torch.randn(4, 6)
    others = layers_of()
    others[1].weight = layers[1].weight
    first, second = Joined(layers), Joined(others)  # the second moves what they share
    with torch.no_grad():
        for layer in (*layers, *others):
            layer.weight.mul_(-2.0)
    assert_equal(first(x), apart(layers, x))
    assert_equal(second(x), apart(others, x))
