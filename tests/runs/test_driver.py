"""Runs in processes of their own: handed over, steered, killed, brought back."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

import rlkit
from rlkit.errors import ConfigError, RequestRefused, RunError
from rlkit.runs.handle import Run, attach, list_runs
from rlkit.runs.launch import launch, write_run
from tests.runs.toys import PlainTrainer, expected_weight, wait_for

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Launches a trainer; what still runs at the end is killed."""
    runs: list[Run] = []

    def begin(trainer: Any, name: str = "exp", steps: int | None = None, **options: Any) -> Run:
        run = launch(trainer, tmp_path / name, steps, **options)
        runs.append(run)
        return run

    yield begin
    for run in runs:
        if run.alive:
            os.kill(run.status["pid"], signal.SIGKILL)


def test_a_trainer_is_handed_over_and_comes_back(start: Start, tmp_path: Path):
    from tests.runs.torch_toy import TorchTrainer

    trainer = TorchTrainer()
    for _ in range(3):
        trainer.step()
    run = start(trainer, track_metrics=("csv", "tensorboard"))
    trainer.release(str(run.dir))
    wait_for(lambda: run.step_count > 6)
    run.pause().wait()
    copy = run.load(copy=True)
    assert copy is not trainer
    assert copy.global_step % 5 == 0
    assert copy.tied.weight is copy.model.weight
    with pytest.raises(RunError, match=r"is paused and owns its state\. stop\(\) it first, or use load\(copy=True\)"):
        run.load()
    run.stop()
    wait_for(lambda: not psutil.pid_exists(run.status["pid"]))
    back = run.load()
    assert back is trainer
    step = trainer.global_step
    assert trainer.model.weight[0].tolist() == pytest.approx(expected_weight(step), abs=1e-4)
    trainer.step()
    assert trainer.tied.weight[0].tolist() == pytest.approx(expected_weight(step + 1), abs=1e-4)
    other = attach(run.dir).load()
    other.step()
    assert other.model.weight.tolist() == trainer.model.weight.tolist()
    assert run.metrics.index.tolist() == list(range(4, step + 1))
    assert (run.dir / "metrics.csv").exists()
    assert list((run.dir / "tensorboard").iterdir())


def test_a_second_kernel_steers_the_run(start: Start, tmp_path: Path):
    run = start(PlainTrainer())
    other = rlkit.attach(str(tmp_path / "exp"))
    assert other.pause().wait().state == "applied"
    assert run.state == "paused"
    with pytest.raises(RequestRefused, match="reward_weights has no 'jo'"):
        other.set(reward_weights={"jo": 1}).wait()
    assert [item.name for item in list_runs(tmp_path)] == ["exp"]
    other.stop()
    assert repr(run) == f"<Run exp: stopped at step {run.step_count}, asked from python>"
    bundle = run._repr_mimebundle_()
    assert "<b>exp</b>: stopped at step" in bundle["text/html"]


def test_two_trainers_cannot_share_a_folder(start: Start, tmp_path: Path):
    run = start(PlainTrainer())
    with pytest.raises(RunError, match=r"already holds a run \(running at step \d+\)"):
        launch(PlainTrainer(), tmp_path / "exp")
    step = run.step_count
    wait_for(lambda: run.step_count > step)
    run.stop()
    with pytest.raises(RunError, match="already holds a run"):
        launch(PlainTrainer(), tmp_path / "exp")


def test_a_second_driver_on_a_live_run_gives_up(start: Start, monkeypatch: pytest.MonkeyPatch):
    from rlkit.runs import driver

    monkeypatch.setattr(driver, "LOCK_WAIT_S", 0.1)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    run = start(PlainTrainer())
    with pytest.raises(RunError, match=rf"already driven by another trainer \(process {run.status['pid']}"):
        driver.main(str(run.dir))
    assert run.alive


def test_a_killed_driver_shows_as_failed_within_seconds(start: Start):
    run = start(PlainTrainer())
    other = attach(run.dir)
    wait_for(lambda: run.step_count > 3)
    pid = run.status["pid"]
    os.kill(pid, signal.SIGSTOP)
    request = run.pause()
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    wait_for(lambda: run.state == other.state == "failed")
    assert time.monotonic() - began < 10
    assert run.status["reason"] == "the driver process died (signal SIGKILL)"
    assert f"the driver process {pid} died without a word" in other.status["reason"]
    with pytest.raises(RunError, match=r"was not answered: the run is failed"):
        request.wait()
    with pytest.raises(RunError, match="signal SIGKILL"):
        run.wait()
    back = other.load()
    assert back.weight == expected_weight(back.global_step)


def test_a_driver_that_is_told_to_end_saves_first(start: Start):
    run = start(PlainTrainer(checkpoint_config={"save_interval": 0}))
    wait_for(lambda: run.step_count > 3)
    os.kill(run.status["pid"], signal.SIGTERM)
    run.wait(60)
    assert run._process is not None
    assert run._process.exit_code(within_s=30) == 0
    assert (run.state, run.status["reason"]) == ("stopped", "SIGTERM")
    back = attach(run.dir).load()
    assert back.global_step == run.step_count


class Breaks(PlainTrainer):
    """Prints, and fails at step 5."""

    def step(self) -> Any:
        print("about to take step", self.global_step + 1)
        return super().step()


def test_a_failing_step_ends_the_run_with_its_trace(start: Start):
    run = start(Breaks(fail_at=5))
    with pytest.raises(RunError, match=r"(?s)failed at step 4: ValueError: the toy broke.*Traceback"):
        run.wait(60)
    assert "about to take step 5" in run.tail(50)
    assert run._process is not None
    assert run._process.exit_code(within_s=30) == 1


class Unloadable(PlainTrainer):
    """Can take its state in the process that made it only."""

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if os.getpid() != self.home:
            raise KeyError("no such layer")
        super().load_state_dict(state)


@pytest.mark.parametrize("release_first", [False, True])
def test_a_driver_that_does_not_come_up_is_an_error_and_the_trainer_is_kept(
    tmp_path: Path, release_first: bool, start: Start
):
    trainer = Unloadable()
    trainer.step()
    with pytest.raises(RunError, match=r"(?s)did not start: KeyError: 'no such layer'.*Traceback"):
        launch(trainer, tmp_path / "exp", release_first=release_first)
    assert trainer.weight == expected_weight(1)
    assert trainer.owner == ""
    run = start(PlainTrainer(), steps=3)  # the folder is free again
    run.wait(60)
    assert run.state == "finished"


def test_the_trainer_can_give_up_its_memory_before_the_driver_takes_it(start: Start):
    trainer = PlainTrainer()
    run = start(trainer, steps=2, release_first=True)
    assert trainer.owner == str(run.dir)
    run.wait(60)
    assert run.load() is trainer
    assert trainer.weight == expected_weight(2)


def test_nothing_is_left_of_a_launch_that_cannot_be(tmp_path: Path):
    lock = threading.Lock()

    def reward(response: str) -> float:
        with lock:
            return len(response)

    with pytest.raises(RunError, match=r"'lock', which reward\(\) uses"):
        launch(PlainTrainer(reward=reward), tmp_path / "exp")
    with pytest.raises(ConfigError, match="no 'wandb'"):
        launch(PlainTrainer(), tmp_path / "exp", track_metrics=["wandb"])
    with pytest.raises(ConfigError, match="no 'keep'"):
        launch(PlainTrainer(), tmp_path / "exp", checkpoint_config={"keep": 2})
    assert not (tmp_path / "exp").exists()


def test_a_full_disk_at_the_start_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlkit.runs.checkpoint._write_json", full)
    with pytest.raises(OSError, match="no room for the run in"):
        launch(PlainTrainer(), tmp_path / "exp")
    assert not (tmp_path / "exp").exists()


class Slow(PlainTrainer):
    """Steps that take long."""

    def learn(self) -> float:
        time.sleep(4)
        return 0.0


def test_the_heart_beats_during_a_long_step(start: Start):
    run = start(Slow())
    ages = []
    until = time.monotonic() + 3.5
    while time.monotonic() < until:
        ages.append(run.status["heartbeat_age_s"])
        time.sleep(0.1)
    assert run.step_count == 0
    assert max(ages) < 3.0  # a beat a second; the rest is for a busy machine
    with pytest.raises(RunError, match=r"not answered within 0\.1 s; it is still pending.*step 1 is still going on"):
        run.pause().wait(timeout=0.1)
    with pytest.raises(RunError, match=r"is running at step 0 after 0\.1 s; it goes on"):
        run.wait(timeout=0.1)


def test_runs_are_listed_newest_first(tmp_path: Path):
    for name in ("a", "group/b"):
        write_run(PlainTrainer(), tmp_path / name, 1)
    (tmp_path / "notes").mkdir()
    assert [run.name for run in list_runs(tmp_path)] == ["b", "a"]
    with pytest.raises(RunError, match="there is no folder"):
        list_runs(tmp_path / "gone")


def test_a_handle_on_something_else_is_an_error(tmp_path: Path):
    with pytest.raises(RunError, match="not a run folder"):
        attach(tmp_path)
