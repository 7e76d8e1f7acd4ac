"""Parameters in half precision are trained through float32 master weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

from rlkit.engines.masters import round_parameters
from rlkit.engines.train import Group, TrainEngine


def layer(dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3, bias=False).to(dtype)


def engine(module: nn.Module, lr: float = 1e-4) -> TrainEngine:
    built = TrainEngine([Group("actor", module)])
    built.set_lr({"actor": lr})
    return built


def learn(module: nn.Module, trained: TrainEngine, times: int) -> None:
    for _ in range(times):
        trained.backward(module(torch.ones(1, 4, dtype=module.weight.dtype)).sum().float())
        trained.step(1e9)


def test_updates_too_small_for_bfloat16_add_up() -> None:
    """AdamW moves each weight by about the learning rate; 100 moves of 1e-5 are 1e-3, one alone rounds to nothing."""
    half, full = layer(), layer().float()
    start = full.weight.detach().clone()
    learn(half, engine(half, 1e-5), 1)
    unmoved = (half.weight.float() == start).float().mean()
    assert unmoved > 0.8
    half = layer()
    learn(half, engine(half, 1e-5), 100)
    learn(full, engine(full, 1e-5), 100)
    assert torch.equal(half.weight, full.weight.bfloat16())
    torch.testing.assert_close(full.weight - start, torch.full((3, 4), -1e-3), atol=1e-5, rtol=0)


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    """256 micro-batches with gradient 1 and one with 1/2: bfloat16 sums would stay at 256."""
    module = layer()
    trained = engine(module)
    for share in [1.0] * 256 + [0.5]:
        trained.backward((share * module(torch.ones(1, 4, dtype=torch.bfloat16))).sum().float())
    (master,) = (master for _, master in trained.masters.pairs)
    assert master.grad is not None
    assert torch.equal(master.grad, torch.full((3, 4), 256.5))
    assert module.weight.grad is None
    trained.clear()
    assert master.grad is None


def test_masters_travel_in_the_state_and_go_on_where_they_were() -> None:
    whole, first = layer(), layer()
    learn(whole, engine(whole, 1e-5), 60)
    before = engine(first, 1e-5)
    learn(first, before, 30)
    state = copy.deepcopy(before.state_dict())
    assert state["optimizer"]["actor.weight"]["master"].dtype == torch.float32
    second = layer()
    after = engine(second, 1e-5)
    after.load_state_dict(state)
    assert torch.equal(second.weight, first.weight)
    learn(second, after, 30)
    assert torch.equal(second.weight, whole.weight)


def test_released_masters_come_back_with_the_state() -> None:
    module = layer()
    trained = engine(module)
    learn(module, trained, 3)
    state, weights = copy.deepcopy(trained.state_dict()), module.weight.detach().clone()
    trained.release()
    assert sum(master.numel() for _, master in trained.masters.pairs) == 0
    trained.load_state_dict(state)
    assert torch.equal(module.weight, weights)


def test_weights_that_were_loaded_are_trained_from_there() -> None:
    module = layer()
    trained = engine(module)
    learn(module, trained, 1)
    module.load_state_dict({"weight": torch.full((3, 4), 2.0)})
    learn(module, trained, 1)
    assert (module.weight.float() - 2).abs().max() < 0.01


def test_full_precision_has_no_copies() -> None:
    module = layer(torch.float32)
    trained = engine(module)
    assert trained.masters.pairs == []
    learn(module, trained, 1)
    assert set(trained.state_dict()["optimizer"]["actor.weight"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_rounding_leaves_buffers_alone() -> None:
    module = nn.BatchNorm1d(2)
    round_parameters(module, torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16
    assert module.running_mean is not None
    assert module.running_mean.dtype == torch.float32
