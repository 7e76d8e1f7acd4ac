"""A real trainer in the background: handed over, steered, taken back; nothing of it lost on the way."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch

import rlkit
from rlkit.errors import CheckpointError, RequestRefused, RunError
from tests.trainers.toys import good, grpo, ppo, short


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.actor.model.state_dict().items()}


def equal(a, b) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("build", [ppo, grpo])
def test_state_taken_and_given_back_continues_bit_for_bit(build):
    options = {"reference": True, "kl_coef": 0.05, "ppo_epochs": 2, "minibatch_size": 8}
    straight, first, second = build(**options), build(**options), build(**options, seed=9)
    for _ in range(5):
        expected = straight.step()
    for _ in range(2):
        first.step()
    first.set(lr=first.settings()["lr"])
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        result = second.step()
    assert result.rollouts["response"] == expected.rollouts["response"]
    assert equal(weights(second), weights(straight))
    with pytest.raises(CheckpointError, match="missing"):
        second.load_state_dict({"global_step": 1})


def test_a_run_starts_where_the_cell_stopped_and_comes_back(tmp_path):
    def bonus(response):  # a function of this test: it travels by value
        return 0.25 * response.split().count("film")

    options = {"reward": {"good": good, "bonus": bonus}, "reference": True, "kl_coef": 0.01}
    trainer, twin = ppo(**options), ppo(**options)
    for one in (trainer, twin):
        one.step()
    run = trainer.start(str(tmp_path / "exp"), steps=4)
    assert all(p.numel() == 0 for p in trainer.actor.model.parameters())
    assert not trainer.learner.engines["policy"].optimizer.state
    with pytest.raises(RunError, match=r"owns this trainer's weights.*run\.load\(\)"):
        trainer.step()
    run.wait(timeout=120)
    assert run.load() is trainer
    for _ in range(4):
        expected = twin.step()
    assert trainer.global_step == twin.global_step == 5
    assert equal(weights(trainer), weights(twin))
    assert list(run.metrics.index) == [2, 3, 4, 5]
    assert run.reader.rollouts(5)["response"].tolist() == expected.rollouts["response"]
    copy = rlkit.attach(tmp_path / "exp").load()
    assert copy is not trainer
    a, b = copy.step(), trainer.step()
    assert a.rollouts["response"] == b.rollouts["response"]
    assert equal(weights(copy), weights(trainer))


def test_a_run_is_steered_while_it_goes_on(tmp_path):
    trainer = ppo(reward={"good": good, "short": short})
    run = trainer.start(str(tmp_path / "exp"))
    answer = run.set(reward_weights={"short": 0.5}, lr=1e-4).wait()
    assert answer.state == "applied"
    assert run.settings["reward_weights"] == {"good": 1.0, "short": 0.5}
    for bad, reason in (
        ({"reward_weights": {"shrt": 1.0}}, "shrt"),
        ({"kl_coef": 1.0}, "needs a reference"),
        ({"lr": -1.0}, "lr"),
        ({"batch_size": 3}, "batch_size"),
    ):
        with pytest.raises(RequestRefused, match=reason):
            run.set(**bad).wait()
    assert run.settings["lr"] == 1e-4
    run.pause().wait()
    before = run.step_count
    run.step(2).wait()
    assert run.step_count == before + 2
    run.checkpoint().wait()
    run.resume().wait()
    run.stop()
    table = run.reader.rollouts(run.step_count)
    for total, a, b in zip(table["reward"], table["reward/good"], table["reward/short"], strict=True):
        assert total == pytest.approx(a + 0.5 * b, abs=1e-6)
    assert run.load().settings()["reward_weights"] == {"good": 1.0, "short": 0.5}


def test_the_launch_cell_can_be_run_again(tmp_path):
    first = ppo().start(str(tmp_path / "exp"))
    pid = first.status["pid"]
    with pytest.raises(RunError, match="already holds a run"):
        ppo().start(str(tmp_path / "exp"))
    second = ppo().start(str(tmp_path / "exp"), steps=2, replace=True)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert rlkit.attach(tmp_path / "exp.1").state == "stopped"
    second.wait(timeout=120)


def test_an_interrupt_of_foreground_training_loses_nothing(tmp_path):
    trainer, twin = ppo(), ppo()
    calls = 0

    def interrupting(responses):
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return good(responses)

    trainer.actor.rng, twin.actor.rng = (torch.Generator().manual_seed(1) for _ in range(2))
    trainer.rewards[0].scorer.fn = interrupting
    run = trainer.train(50, dir=tmp_path / "exp", progress=False)
    assert run.state == "paused"
    assert 0 < trainer.global_step < 50
    done = trainer.global_step
    run = trainer.train(2, progress=False)
    assert (run.dir.name, trainer.global_step) == ("exp", done + 2)
    for _ in range(done + 2):
        twin.step()
    assert equal(weights(trainer), weights(twin))


def test_a_reward_that_fails_in_a_run_is_named_and_the_run_can_be_loaded(tmp_path):
    def fragile(responses):
        if len(seen) >= 2:
            raise ValueError("the scoring service is down")
        seen.append(1)
        return good(responses)

    seen: list[int] = []
    trainer = ppo(reward=fragile, batch_size=4)
    trainer.rewards[0].streams = False
    trainer.dataflow = trainer._assemble()
    run = trainer.start(str(tmp_path / "exp"), steps=5)
    with pytest.raises(RunError, match="fragile.*the scoring service is down"):
        run.wait(timeout=120)
    assert run.state == "failed"
    assert run.step_count == 2
    assert run.load() is trainer
