"""The optimizer step: accumulation, clipping, skipping, state, taking over a user's optimizer."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlkit.engines.logprobs import response_scores
from rlkit.engines.train import Group, TrainEngine
from rlkit.errors import CheckpointError, ConfigError, ModelError, RlkitError
from tests.tiny import tiny_model

NAN, INF = float("nan"), float("inf")


class Weights(nn.Module):
    """Three numbers; the gradient is whatever the test wants."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))

    def loss(self, gradient: list[float]) -> Tensor:
        """A loss with this gradient."""
        return (self.weight * torch.tensor(gradient)).sum()


def engine_of(module: nn.Module, lr: float = 0.1, **options: Any) -> TrainEngine:
    engine = TrainEngine([Group("actor", module)], **options)
    engine.set_lr({"actor": lr})
    return engine


def update(engine: TrainEngine, loss: Tensor, max_grad_norm: float = 1.0) -> float:
    engine.backward(loss)
    return engine.step(max_grad_norm)


def test_the_norm_is_that_before_clipping_and_the_update_uses_the_clipped_gradient() -> None:
    module = Weights()
    engine = TrainEngine([Group("actor", module, torch.optim.SGD(module.parameters(), lr=1.0))])
    engine.set_lr({"actor": 1.0})
    assert update(engine, module.loss([3.0, 0.0, 4.0])) == pytest.approx(5.0)
    assert module.weight.tolist() == pytest.approx([1 - 0.6, 1.0, 1 - 0.8], abs=1e-5)
    assert update(engine, module.loss([0.3, 0.0, 0.4])) == pytest.approx(0.5)  # below the bound: as it is
    assert module.weight.tolist() == pytest.approx([0.1, 1.0, -0.2], abs=1e-5)


def test_an_update_equals_torchs_adamw_on_the_clipped_gradient() -> None:
    module, reference = Weights(), Weights()
    engine = engine_of(module, weight_decay=0.1)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.1)
    for gradient in ([1.0, -2.0, 0.5], [0.1, 0.2, -0.1], [5.0, 0.0, 0.0]):
        update(engine, module.loss(gradient), 1.0)
        optimizer.zero_grad()
        reference.loss(gradient).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        torch.testing.assert_close(module.weight, reference.weight)
    assert module.weight.grad is None


@pytest.mark.parametrize("split", [[8], [1] * 8, [2, 6], [3, 5], [3, 0, 5]])
def test_accumulated_gradients_equal_those_of_one_batch(split: list[int]) -> None:
    """A loss of fixed token weights, in micro-batches of any size, an empty one included."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 48, (8, 10), generator=generator)
    mask = torch.arange(10) < torch.randint(5, 11, (8, 1), generator=generator)
    weights = mask[:, 4:] / mask[:, 4:].sum()

    def gradients(parts: list[int]) -> list[Tensor]:
        model = tiny_model()
        engine = engine_of(model)
        for rows in torch.arange(8).split(parts):
            if len(rows):
                scores = response_scores(model, ids[rows], mask[rows], 4, entropy="differentiable")
                assert scores.entropy is not None
                engine.backward(((scores.logprobs - 0.1 * scores.entropy) * weights[rows]).sum())
        return [p.grad for p in engine.parameters.values() if p.grad is not None]

    for got, expected in zip(gradients(split), gradients([8]), strict=True):
        assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_a_micro_batch_without_a_gradient_adds_nothing() -> None:
    module = Weights()
    engine = engine_of(module)
    engine.backward(torch.zeros(()))
    assert engine.step(1.0) == 0.0
    assert module.weight.tolist() == [1.0, 1.0, 1.0]
    assert engine.skipped == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_gradient_changes_nothing_and_the_next_step_is_as_without_it(bad: float) -> None:
    module, untouched = Weights(), Weights()
    engine, clean = engine_of(module), engine_of(untouched)
    for e, m in ((engine, module), (clean, untouched)):
        update(e, m.loss([1.0, 2.0, 3.0]))
    weights, state = module.weight.detach().clone(), copy.deepcopy(engine.state_dict())
    norm = update(engine, module.loss([1.0, bad, 1.0]))
    assert not math.isfinite(norm)
    assert torch.equal(module.weight, weights)
    after = engine.state_dict()
    for slot, value in state["optimizer"]["actor.weight"].items():
        assert torch.equal(after["optimizer"]["actor.weight"][slot], value)
    assert (engine.skipped, engine.bad_steps) == (1, 1)
    for e, m in ((engine, module), (clean, untouched)):
        update(e, m.loss([-1.0, 0.5, 1.0]))
    assert torch.equal(module.weight, untouched.weight)
    assert (engine.skipped, engine.bad_steps) == (1, 0)


def test_a_bad_micro_batch_spoils_the_whole_update_and_no_later_one() -> None:
    module = Weights()
    engine = engine_of(module)
    engine.backward(module.loss([NAN, 0.0, 0.0]))
    engine.backward(module.loss([1.0, 1.0, 1.0]))
    assert math.isnan(engine.step(1.0))
    assert module.weight.tolist() == [1.0, 1.0, 1.0]
    assert update(engine, module.loss([3.0, 0.0, 4.0])) == pytest.approx(5.0)


def test_the_third_bad_step_of_three_stops_with_finite_weights() -> None:
    module = Weights()
    engine = engine_of(module, max_bad_steps=3)
    for gradient in ([NAN, 0.0, 0.0], [NAN, 0.0, 0.0], [1.0, 0.0, 0.0], [INF, 0.0, 0.0], [NAN, 0.0, 0.0]):
        update(engine, module.loss(gradient))
    engine.backward(module.loss([NAN, 0.0, 0.0]))
    with pytest.raises(RlkitError, match="3 updates in a row had non-finite gradients"):
        engine.step(1.0)
    assert bool(module.weight.isfinite().all())
    assert module.weight.grad is None
    assert engine.skipped == 5


def test_a_users_optimizer_is_taken_over_with_class_settings_and_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    given = torch.optim.RMSprop(
        [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[1].parameters(), "lr": 1e-4, "alpha": 0.5}],
        lr=1e-3,
        momentum=0.9,
    )
    engine = TrainEngine([Group("actor", model, given)])
    assert type(engine.optimizer) is torch.optim.RMSprop
    assert engine.optimizer is not given
    first, second = engine.optimizer.param_groups
    assert [id(p) for p in first["params"]] == [id(model[0].weight)]  # frozen ones are left out
    assert (first["momentum"], second["momentum"], second["alpha"]) == (0.9, 0.9, 0.5)
    engine.set_lr({"actor": 2e-6})
    assert [g["lr"] for g in engine.optimizer.param_groups] == pytest.approx([2e-6, 2e-7])


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = Weights(), Weights()
    with pytest.raises(ModelError, match=r"not 'actor.weight'; build it on model.parameters\(\)"):
        TrainEngine([Group("actor", model, torch.optim.Adam(other.parameters()))])


def test_parts_trained_together_need_optimizers_of_one_class() -> None:
    first, second = Weights(), Weights()
    groups = [
        Group("actor", first, torch.optim.Adam(first.parameters())),
        Group("critic", second, torch.optim.SGD(second.parameters(), lr=1.0)),
    ]
    with pytest.raises(ConfigError, match="one class"):
        TrainEngine(groups)


def test_groups_have_rates_of_their_own() -> None:
    first, second = Weights(), Weights()
    engine = TrainEngine([Group("actor", first), Group("critic", second)])
    engine.set_lr({"actor": 0.1, "critic": 0.0})
    update(engine, first.loss([1.0, 1.0, 1.0]) + second.loss([1.0, 1.0, 1.0]))
    assert first.weight.tolist() == pytest.approx([0.9] * 3, abs=1e-4)
    assert second.weight.tolist() == [1.0] * 3


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ModelError, match="requires_grad is off everywhere"):
        TrainEngine([Group("actor", Weights().requires_grad_(False))])


def test_tied_weights_are_updated_once() -> None:
    model = tiny_model()
    names = [name for name in engine_of(model).parameters if "lm_head" in name or "embed" in name]
    assert names == ["actor.model.embed_tokens.weight"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_training_goes_on_bit_for_bit_from_a_loaded_state(kind: Any) -> None:
    straight, resumed = Weights(), Weights()

    def build(module: nn.Module) -> TrainEngine:
        extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        engine = TrainEngine([Group("actor", module, kind(module.parameters(), lr=0.1, **extra))])
        engine.set_lr({"actor": 0.1})
        return engine

    engine = build(straight)
    gradients = [[1.0, -2.0, 0.5], [0.3, 0.2, -0.1], [5.0, 0.0, 0.0], [-1.0, 1.0, 2.0]]
    for gradient in gradients[:2]:
        update(engine, straight.loss(gradient))
    update(engine, straight.loss([NAN, 0.0, 0.0]))
    saved = copy.deepcopy(engine.state_dict())
    weights = straight.weight.detach().clone()
    for gradient in gradients[2:]:
        update(engine, straight.loss(gradient))

    with torch.no_grad():
        resumed.weight.copy_(weights)
    again = build(resumed)
    again.load_state_dict(saved)
    assert (again.bad_steps, again.skipped) == (1, 1)
    for gradient in gradients[2:]:
        update(again, resumed.loss(gradient))
    assert torch.equal(resumed.weight, straight.weight)


def test_a_loaded_state_is_a_copy() -> None:
    module = Weights()
    engine = engine_of(module)
    update(engine, module.loss([1.0, 1.0, 1.0]))
    saved = copy.deepcopy(engine.state_dict())
    kept = {slot: value.clone() for slot, value in saved["optimizer"]["actor.weight"].items()}
    engine.load_state_dict(saved)
    update(engine, module.loss([1.0, 1.0, 1.0]))
    assert all(torch.equal(saved["optimizer"]["actor.weight"][slot], value) for slot, value in kept.items())


def test_state_is_kept_by_name_whatever_the_order_of_the_parameters() -> None:
    class Pair(nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            for name in order:
                setattr(self, name, nn.Linear(1, 1 if name == "a" else 2))

    module, turned = Pair("ab"), Pair("ba")
    engine, other = engine_of(module), engine_of(turned)
    update(engine, sum((p.sum() for p in module.parameters()), torch.zeros(())))
    update(engine, module.a(torch.ones(1, 1)).sum() * 3)
    other.load_state_dict(engine.state_dict())
    for name, slots in engine.state_dict()["optimizer"].items():
        assert torch.equal(other.optimizer.state[other.parameters[name]]["exp_avg"], slots["exp_avg"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("skipped"), "optimizer, bad_steps and skipped"),
        (lambda s: s.update(extra=1), "optimizer, bad_steps and skipped"),
        (lambda s: s["optimizer"].pop("actor.weight"), "1 names differ, first 'actor.weight'"),
        (lambda s: s["optimizer"].update(other={}), "1 names differ, first 'other'"),
        (
            lambda s: s["optimizer"]["actor.weight"].update(exp_avg=torch.zeros(4)),
            r"exp_avg of 'actor.weight' has shape \(4,\) in the state, the parameter \(3,\)",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: Any, message: str) -> None:
    module = Weights()
    engine = engine_of(module)
    update(engine, module.loss([1.0, 2.0, 3.0]))
    before = copy.deepcopy(engine.state_dict())
    wrong = copy.deepcopy(before)
    wrong["bad_steps"] = 2
    change(wrong)
    with pytest.raises(CheckpointError, match=message):
        engine.load_state_dict(wrong)
    after = engine.state_dict()
    assert after["bad_steps"] == 0
    for slot, value in before["optimizer"]["actor.weight"].items():
        assert torch.equal(after["optimizer"]["actor.weight"][slot], value)


def test_a_fresh_engines_state_loads_into_a_fresh_engine() -> None:
    module = Weights()
    state = engine_of(module).state_dict()
    assert state == {"optimizer": {"actor.weight": {}}, "bad_steps": 0, "skipped": 0}
    engine = engine_of(module)
    update(engine, module.loss([1.0, 1.0, 1.0]))
    engine.load_state_dict(state)
    assert not engine.optimizer.state


def test_release_drops_gradients_and_moments() -> None:
    module = Weights()
    engine = engine_of(module)
    update(engine, module.loss([1.0, 1.0, 1.0]))
    engine.backward(module.loss([1.0, 1.0, 1.0]))
    engine.release()
    assert module.weight.grad is None
    assert engine.state_dict()["optimizer"] == {"actor.weight": {}}


def test_one_step_raises_the_probability_of_a_rewarded_end_token() -> None:
    """Pad = end = 2: the sampled end token is in the loss, so a positive advantage makes it likelier."""
    model = tiny_model()
    engine = engine_of(model, lr=1e-3)
    ids = torch.tensor([[4, 2, 5, 5, 6, 2, 2, 2]])
    mask = torch.tensor([[True] * 6 + [False] * 2])  # the response is 5, 6, 2; the last two are padding

    def logprobs() -> Tensor:
        return response_scores(model, ids, mask, 3).logprobs

    before = logprobs()
    update(engine, -before.sum())
    after = logprobs()
    assert after[0, 2] > before[0, 2]
    assert after[0, 3:].tolist() == [0.0, 0.0]
