"""Passes cut by tokens, memory that runs out in the middle of a step, activations, and half precision."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.engines import logprobs
from rlkit.errors import ModelError
from rlkit.generation.gpu.joined import Joined
from rlkit.trainers.base import Trainer, new_learner
from tests.tiny import tiny_model
from tests.trainers.toys import grpo, ppo

OPTIONS: dict[str, Any] = {
    "reference": True,
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "lr": 1e-3,
    "precision": "float32",
}


def parameters(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in trainer.actor.model.parameters()])


def plain_descent(trainer: Any) -> Any:
    """Adam's first update only sees signs; plain descent shows the gradient itself."""
    trainer.actor.optimizer = torch.optim.SGD(trainer.actor.model.parameters(), lr=0.5)
    trainer.learner = new_learner(trainer)
    return trainer


def require_same_step(one: Any, other: Any) -> dict[str, float]:
    """Both take a step, and move alike; gives the other's metrics."""
    before = parameters(one).clone()
    wanted, found = one.step().metrics, other.step().metrics
    moved = parameters(one) - before
    assert moved.norm() > 1e-5
    assert (parameters(other) - before - moved).norm() / moved.norm() < 1e-5
    for name in ("train/entropy", "kl/per_token", "train/grad_norm", "reward/mean"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6)
    return dict(found)


@pytest.mark.parametrize("build", [ppo, grpo])
@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_tokens": 20},
        {"micro_batch_tokens": 20, "use_dynamic_batching": True},
        {"activations": "recompute"},
        {"activations": "offload", "micro_batch_size": 3},
    ],
    ids=lambda options: "+".join(options),
)
def test_how_a_step_is_cut_does_not_change_it(build: Any, options: dict[str, Any]) -> None:
    metrics = require_same_step(plain_descent(build(**OPTIONS)), plain_descent(build(**OPTIONS, **options)))
    if "micro_batch_tokens" in options:
        assert metrics["train/micro_batch_tokens"] == 20


class LittleMemory:
    """Fails like an allocator when a forward is given more response tokens than `room`."""

    def __init__(self, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self.failures, real = room, 0, logprobs._states

        def states(model: Any, head: Any, ids: Tensor, attention_mask: Tensor, mask: Tensor) -> Tensor:
            found = real(model, head, ids, attention_mask, mask)
            if int(mask.sum()) > self.room:
                self.failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return found

        monkeypatch.setattr(logprobs, "_states", states)


@pytest.mark.parametrize("build", [ppo, grpo])
def test_memory_that_runs_out_costs_nothing_but_time(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring and learning both go on in smaller parts; gradients and metrics of failed attempts are not counted."""
    plenty, little = plain_descent(build(**OPTIONS)), plain_descent(build(**OPTIONS))
    before = parameters(plenty).clone()
    wanted = plenty.step().metrics
    moved = parameters(plenty) - before
    memory = LittleMemory(room=12, monkeypatch=monkeypatch)
    found = little.step().metrics
    assert memory.failures >= 2
    assert (parameters(little) - before - moved).norm() / moved.norm() < 1e-5
    for name in ("train/entropy", "kl/per_token", "train/grad_norm"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6)
    failures = memory.failures
    little.step()
    assert memory.failures == failures, "the limit that was found holds in the steps after it"


def test_what_generation_keeps_for_speed_goes_before_passes_get_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is asked for once; the pass that did not fit is tried again as it is."""
    trainer = grpo(**OPTIONS | {"kl_coef": 0.0, "reference": False})
    memory, kept = LittleMemory(room=12, monkeypatch=monkeypatch), [True]

    def spare() -> bool:
        memory.room = 10**6
        return kept.pop() if kept else False

    monkeypatch.setattr(trainer.actor.generator, "spare", spare)
    trainer.step()
    assert memory.failures == 1
    assert trainer.learner.budget.ceiling is None
    memory.room = 12
    monkeypatch.setattr(trainer.actor.generator, "spare", lambda: False)
    trainer.step()
    assert memory.failures > 1
    assert trainer.learner.budget.ceiling is not None


def test_a_sequence_that_does_not_fit_alone_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = grpo(**OPTIONS)
    before = parameters(trainer).clone()
    LittleMemory(room=0, monkeypatch=monkeypatch)
    with pytest.raises(Exception, match="single sequence of .* tokens: set activations='recompute'") as caught:
        trainer.step()
    assert isinstance(caught.value, ModelError)
    assert torch.equal(parameters(trainer), before)
    monkeypatch.undo()
    trainer.step()


@pytest.mark.parametrize("build", [ppo, grpo])
def test_bfloat16_learns_through_masters_and_goes_on_from_its_state(build: Any) -> None:
    def built() -> Any:
        return build(**OPTIONS | {"lr": 1e-5, "precision": "bfloat16"}, model=tiny_model())

    trainer = built()
    assert {p.dtype for p in trainer.actor.model.parameters()} == {torch.bfloat16}
    assert trainer.reference.model.dtype == torch.bfloat16
    if trainer.critic is not None:
        assert trainer.critic.head.linear.weight.dtype == torch.float32
    engine = trainer.learner.engines["policy"]
    start = torch.cat([engine.masters.of(p).detach().flatten() for p in trainer.actor.model.parameters()])
    trainer.step()
    trainer.step()
    after = torch.cat([engine.masters.of(p).detach().flatten() for p in trainer.actor.model.parameters()])
    moved = (after - start).abs()
    assert 0 < float(moved.max()) < 1e-4, "updates far below bfloat16's resolution of the weights are kept"
    state, other = copy.deepcopy(trainer.state_dict()), built()
    other.load_state_dict(state)
    one, two = trainer.step().metrics, other.step().metrics
    assert one["train/entropy"] == two["train/entropy"]
    assert torch.equal(parameters(trainer), parameters(other))


def test_precision_is_the_models_own_on_the_cpu_and_half_on_a_gpu() -> None:
    trainer = grpo(reference=True)
    expected = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    assert trainer.actor.model.dtype == trainer.reference.model.dtype == expected


def lay_side_by_side(model: Any) -> None:
    """Weights as decoding on a GPU leaves them: views of larger tensors."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
            assert Joined(group).weight is not None


def test_a_run_in_the_background_keeps_its_master_weights(tmp_path: Path) -> None:
    """One step here, two in the driver, one here again: the same weights as four steps here."""
    options = {**OPTIONS, "precision": "bfloat16", "activations": "recompute", "micro_batch_tokens": 40}
    trainer, other = grpo(**options), grpo(**options)
    trainer.step()
    lay_side_by_side(trainer.actor.model)
    run = trainer.start(str(tmp_path / "run"), steps=2)
    run.wait()
    trainer = run.load()
    trainer.step()
    for _ in range(4):
        other.step()
    assert {p.dtype for p in trainer.actor.model.parameters()} == {torch.bfloat16}
    assert torch.equal(parameters(trainer), parameters(other))
    masters = [trainer.learner.engines["policy"].masters.of(p) for p in trainer.actor.model.parameters()]
    assert {master.dtype for master in masters} == {torch.float32}
