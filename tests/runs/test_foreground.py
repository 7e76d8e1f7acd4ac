"""Training in the cell: the same run folder, interrupts at a safe point."""

import io
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlkit.errors import RunError
from rlkit.runs.checkpoint import CheckpointStore
from rlkit.runs.foreground import train_here
from rlkit.runs.handle import Run, attach
from rlkit.runs.layout import DriverLock, lock_is_held
from rlkit.runs.progress import ProgressLine
from rlkit.runs.protocol import StepResult
from tests.runs.toys import PlainTrainer, expected_weight, wait_for


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in attach(run.dir).reader.poll() if event["type"] == kind]


def test_steps_are_taken_here_and_recorded_as_anywhere(tmp_path: Path):
    trainer = PlainTrainer(delay_s=0)
    run = train_here(trainer, 7, tmp_path / "exp", progress=False, track_metrics=("csv",))
    assert trainer.global_step == 7
    assert (run.state, run.alive) == ("finished", False)
    assert run.metrics.index.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert len((run.dir / "metrics.csv").read_text().splitlines()) == 8
    back = run.load()
    assert back is not trainer
    assert back.weight == trainer.weight == expected_weight(7)


def test_another_call_goes_on_in_the_same_folder(tmp_path: Path):
    trainer = PlainTrainer(delay_s=0)
    first = train_here(trainer, 2, tmp_path / "exp", progress=False)
    started = first.status["started"]
    trainer.step()
    second = train_here(trainer, 2, progress=False)
    assert second.dir == first.dir
    assert trainer.global_step == 5
    assert second.metrics.index.tolist() == [1, 2, 4, 5]
    assert (second.status["total_steps"], second.status["started"]) == (5, started)
    with pytest.raises(RunError, match="already holds a run"):
        train_here(PlainTrainer(), 1, tmp_path / "exp", progress=False)
    third = train_here(trainer, 1, tmp_path / "other", progress=False)
    assert third.metrics.index.tolist() == [6]


def test_without_a_folder_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    runs = [train_here(PlainTrainer(delay_s=0), 1, progress=False) for _ in range(2)]
    assert all(run.dir.parent == tmp_path / "runs" and run.name.startswith("toy-") for run in runs)
    assert runs[0].dir != runs[1].dir


def test_a_trainer_that_cannot_be_pickled_trains_here_all_the_same(tmp_path: Path):
    lock = threading.Lock()

    def reward(response: str) -> float:
        with lock:
            return len(response)

    run = train_here(PlainTrainer(reward=reward), 2, tmp_path / "exp", progress=False)
    assert run.state == "finished"
    with pytest.raises(RunError, match=r"no recipe: 'lock', which reward\(\) uses"):
        run.load()


def after(delay_s: float, *calls: Any) -> None:
    def work() -> None:
        for call in calls:
            time.sleep(delay_s)
            call()

    threading.Thread(target=work, daemon=True).start()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_finishes_the_step_saves_and_returns(tmp_path: Path):
    trainer = PlainTrainer(delay_s=0.3)
    after(0.7, interrupt)
    run = train_here(trainer, 100, tmp_path / "exp", progress=False)
    step = trainer.global_step
    assert 0 < step < 10
    status = run.status
    assert (status["state"], status["step"], status["alive"]) == ("paused", step, False)
    assert "interrupted in the cell" in status["reason"]
    assert CheckpointStore(run.dir / "checkpoints").newest().step == step
    assert trainer.weight == expected_weight(step)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not lock_is_held(run.reader.folder)
    with pytest.raises(RunError, match="nobody answers pause"):
        run.pause()
    trainer.delay_s = 0
    assert train_here(trainer, 2, progress=False).metrics.index.tolist() == list(range(1, step + 3))


class Torn(PlainTrainer):
    """Changes its weight at once and then takes long: an interrupt finds a half-done step."""

    def learn(self) -> float:
        self.weight[0] = 99.0
        time.sleep(20)
        return 0.0


def test_a_second_interrupt_goes_back_to_the_newest_checkpoint(tmp_path: Path):
    trainer = PlainTrainer(delay_s=0, checkpoint_config={"save_interval": 2})
    train_here(trainer, 3, tmp_path / "exp", progress=False)
    trainer.__class__ = Torn
    after(0.6, interrupt, interrupt)
    began = time.monotonic()
    run = train_here(trainer, 5, progress=False)
    assert time.monotonic() - began < 15
    assert trainer.weight == expected_weight(3)
    assert run.status["reason"] == "interrupted after step 3; back at the checkpoint of step 3"
    assert run.state == "paused"


def test_requests_are_served_between_steps(tmp_path: Path):
    trainer = PlainTrainer(delay_s=0.05)
    found: dict[str, Any] = {}

    def steer() -> None:
        run = attach(wait_for(lambda: (tmp_path / "exp" / "events.jsonl").exists() and tmp_path / "exp"))
        wait_for(lambda: run.alive)
        found["set"] = run.set(lr=0.01).wait().state
        found["state"] = run.state
        run.stop()

    thread = threading.Thread(target=steer)
    thread.start()
    run = train_here(trainer, None, tmp_path / "exp", progress=False)
    thread.join(30)
    assert found == {"set": "applied", "state": "running"}
    assert run.state == "stopped"
    assert trainer.lr == 0.01


def test_a_failing_step_raises_here_and_training_can_go_on(tmp_path: Path):
    trainer = PlainTrainer(delay_s=0, fail_at=3)
    with pytest.raises(ValueError, match="the toy broke"):
        train_here(trainer, 5, tmp_path / "exp", progress=False)
    run = attach(tmp_path / "exp")
    assert run.state == "failed"
    assert not lock_is_held(run.reader.folder)
    trainer.fail_at = None
    assert train_here(trainer, 2, progress=False).state == "finished"
    assert run.metrics.index.tolist() == [1, 2, 3, 4]


def test_the_folder_is_taken_while_another_trains_in_it(tmp_path: Path):
    trainer = PlainTrainer(delay_s=0)
    run = train_here(trainer, 1, tmp_path / "exp", progress=False)
    with DriverLock(run.reader.folder), pytest.raises(RunError, match="already driven by another trainer"):
        train_here(trainer, 1, progress=False)


def test_what_a_full_disk_held_back_is_written_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = PlainTrainer(delay_s=0, checkpoint_config={"save_interval": 0})
    run = train_here(trainer, 1, tmp_path / "exp", progress=False)
    kept = run.dir / "kept"
    os.rename(run.dir / "events.jsonl", kept)
    (run.dir / "events.jsonl").symlink_to("/dev/full")
    after(1.0, interrupt)
    train_here(trainer, 5, progress=False)
    assert run.state == "paused"
    assert "disk full" in run.status["reason"]
    (run.dir / "events.jsonl").unlink()
    os.rename(kept, run.dir / "events.jsonl")
    train_here(trainer, 5, progress=False)
    assert run.metrics.index.tolist() == list(range(1, trainer.global_step + 1))
    assert events(run, "state")[-1]["state"] == "finished"


def test_progress_is_one_line_apart_from_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train_here(PlainTrainer(delay_s=0), 3, tmp_path / "a", progress=False)
    assert capsys.readouterr() == ("", "")
    train_here(PlainTrainer(delay_s=0), 3, tmp_path / "b", progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "step 3/3" in shown.err
    assert shown.err.count("\n") == 1
    stream = io.StringIO()
    line = ProgressLine(10, 20, stream)
    line(StepResult(15, {"reward/mean": 0.5, "kl/per_token": 0.25}))
    line.close()
    assert "████████████░░░░░░░░░░░░  step 15/20" in stream.getvalue()
    assert stream.getvalue().endswith("reward 0.500  kl 0.250\n")


def test_a_step_and_its_line_say_what_there_is_of_rewards_and_of_pairs():
    pairs = {"preferences/loss": 0.69314, "preferences/accuracy": 0.75, "preferences/margin": 0.1, "train/lr": 1e-6}
    table = {"response": ["good", "bad"]}
    assert repr(StepResult(3, pairs, [], table)) == (
        "<step 3: preferences/loss 0.6931, preferences/accuracy 0.75, preferences/margin 0.1; 4 metrics, 2 rollouts>"
    )
    assert repr(StepResult(4, {"reward/mean": 0.5}, [], table)) == "<step 4: reward/mean 0.5; 1 metrics, 2 rollouts>"
    stream = io.StringIO()
    line = ProgressLine(0, None, stream)
    line(StepResult(3, pairs))
    assert stream.getvalue().endswith("s/step  accuracy 0.750")
