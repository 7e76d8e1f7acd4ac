"""The loop between steps: requests, their one answer, saving and ending."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlkit.errors import RequestRefused, RunError
from rlkit.runs.checkpoint import CheckpointPolicy, CheckpointStore
from rlkit.runs.control import send
from rlkit.runs.handle import Run
from rlkit.runs.heartbeat import Heartbeat
from rlkit.runs.layout import DriverLock, RunFolder
from rlkit.runs.loop import RunLoop
from tests.runs.driven import driven
from tests.runs.toys import PlainTrainer, expected_weight, wait_for


def test_a_run_takes_its_steps_and_records_each(tmp_path: Path):
    trainer = PlainTrainer(delay_s=0)
    with driven(tmp_path / "exp", trainer, 12) as made:
        made.join()
        assert made.loop.state == "finished"
        assert trainer.weight == expected_weight(12)
        assert made.run.metrics.index.tolist() == list(range(1, 13))
        assert len(made.run.rollouts) == 24
        assert [event["step"] for event in made.events("spans")] == list(range(1, 13))
        assert [event["step"] for event in made.events("rollouts")] == list(range(1, 13))
        assert [event["step"] for event in made.events("checkpoint")] == [0, 5, 10, 12]
        states = [(event["state"], event["step"]) for event in made.events("state")]
        assert states == [("running", 0), ("finished", 12)]
        saved = CheckpointStore(made.folder.checkpoints).complete()
        assert [item.step for item in saved] == [10, 12]  # keep_last_k is 2
        status = made.run.status
        assert (status["state"], status["step"], status["total_steps"], status["alive"]) == ("finished", 12, 12, False)


def test_a_step_that_is_announced_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever waits for a step reads its metrics and rollouts next."""
    update, seen = Heartbeat.update, []

    def watched(self: Heartbeat, **fields: Any) -> None:
        if fields.get("step") and set(fields) == {"step"}:
            run = Run(tmp_path / "exp")
            seen.append((fields["step"], run.metrics.index[-1], len(run.rollouts)))
        update(self, **fields)

    monkeypatch.setattr(Heartbeat, "update", watched)
    with driven(tmp_path / "exp", PlainTrainer(delay_s=0), 5) as made:
        made.join()
    assert seen == [(step, step, 2 * step) for step in range(1, 6)]


def test_pause_step_resume_and_stop(tmp_path: Path):
    trainer = PlainTrainer()
    with driven(tmp_path / "exp", trainer) as made:
        run = made.run
        paused_at = run.pause().wait().step
        assert run.state == "paused"
        assert paused_at == trainer.global_step
        stepped = run.step(3).wait()
        assert stepped.step == trainer.global_step == paused_at + 3
        assert run.state == "paused"
        assert run.pause().wait().state == "applied"
        run.resume().wait()
        wait_for(lambda: trainer.global_step > paused_at + 5)
        run.stop()
        assert run.state == "stopped"
        assert CheckpointStore(made.folder.checkpoints).newest().step == trainer.global_step
        assert trainer.weight == expected_weight(trainer.global_step)


def test_single_steps_are_for_paused_runs(tmp_path: Path):
    with driven(tmp_path / "exp", PlainTrainer()) as made:
        with pytest.raises(RequestRefused, match="not paused"):
            made.run.step().wait()
        made.run.pause().wait()
        for bad in (0, -1, "two"):
            with pytest.raises(RequestRefused, match="whole number"):
                made.run.step(bad).wait()  # type: ignore[arg-type]


def test_steps_that_are_cut_short_say_how_many_were_taken(tmp_path: Path):
    with driven(tmp_path / "exp", PlainTrainer(delay_s=0.05)) as made:
        before = made.run.pause().wait().step
        stepping = made.run.step(1000)
        wait_for(lambda: made.trainer.global_step >= before + 2)
        made.run.pause().wait()
        stepping.wait()
        assert stepping.reason == f"took {stepping.step - before} of 1000 steps: the run was paused"


def test_a_change_is_in_force_from_the_next_step_and_kept_in_checkpoints(tmp_path: Path):
    with driven(tmp_path / "exp", PlainTrainer()) as made:
        made.run.pause().wait()
        request = made.run.set(reward_weights={"joy": 0.25}, lr=0.01, limit=3.0).wait()
        assert repr(request) == (
            f"<set(reward_weights={{'joy': 0.25}}, lr=0.01, limit=3.0): applied at step {request.step}>"
        )
        assert made.run.settings["reward_weights"] == {"brevity": 1.0, "joy": 0.25}
        made.run.step(2).wait()
        weights = made.run.metrics["reward/joy"]
        assert weights[request.step] == 0.5
        assert weights[request.step + 1] == weights[request.step + 2] == 0.25
        assert made.events("settings")[-1]["settings"]["lr"] == 0.01
        made.run.checkpoint().wait()
        store = CheckpointStore(made.folder.checkpoints)
        assert store.load(store.newest())["settings"]["limit"] == 3.0


def test_a_change_made_while_paused_is_saved_at_the_end(tmp_path: Path):
    with driven(tmp_path / "exp", PlainTrainer()) as made:
        made.run.pause().wait()
        made.run.checkpoint().wait()
        made.run.set(lr=0.5).wait()
        made.run.stop()
        store = CheckpointStore(made.folder.checkpoints)
        assert store.load(store.newest())["settings"]["lr"] == 0.5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lrr": 1.0}, "did you mean 'lr'"),
        ({"reward_weights": {"jou": 1.0}}, "reward_weights has no 'jou'"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"lr": float("nan")}, "lr must be a finite number; got nan"),
        ({"lr": -1.0}, "lr must be above 0, got -1.0"),
        ({"temperature": 13}, "ZeroDivisionError: thirteen"),
        ({}, "at least one setting"),
    ],
)
def test_a_bad_change_is_refused_with_its_reason_and_the_run_goes_on(
    tmp_path: Path, changes: dict[str, Any], reason: str
):
    with driven(tmp_path / "exp", PlainTrainer()) as made:
        before = dict(made.run.settings)
        request = made.run.set(**changes)
        with pytest.raises(RequestRefused, match=reason.replace("'", "'")):
            request.wait()
        assert "refused at step" in repr(request)
        assert made.run.settings == before
        step = made.trainer.global_step
        wait_for(lambda: made.trainer.global_step > step + 2)
        assert made.run.state == "running"


def test_lines_that_are_no_requests_are_answered_once_too(tmp_path: Path):
    with driven(tmp_path / "exp", PlainTrainer()) as made:
        with open(made.folder.control, "ab") as stream:
            stream.write(b'{"nonsense\n\n{"id":"x1","kind":"dance"}\n{"id":"x2","kind":"pause","args":{"now":1}}\n')
        wait_for(lambda: len(made.events("request")) == 3)
        first, second, third = made.events("request")
        assert (first["kind"], first["status"]) == ("unreadable", "refused")
        assert (second["id"], second["status"]) == ("x1", "refused")
        assert "unknown kind of request 'dance'" in second["reason"]
        assert "pause takes no arguments" in third["reason"]
        assert made.run.state == "running"


def test_requests_are_answered_once_also_across_a_restart_of_the_driver(tmp_path: Path):
    with driven(tmp_path / "exp", PlainTrainer()) as made:
        made.run.set(lr=0.5).wait()
        made.run.stop()
    folder, trainer = made.folder, PlainTrainer()
    store = CheckpointStore(folder.checkpoints)
    trainer.load_state_dict(store.load(store.newest()))
    left = send(folder.root, "set", {"lr": 0.25})
    with DriverLock(folder):
        RunLoop(trainer, folder, total_steps=trainer.global_step + 2).run()
    answers = made.events("request")
    assert [(event["kind"], event["status"]) for event in answers] == [
        ("set", "applied"),
        ("stop", "applied"),
        ("set", "applied"),
    ]
    assert answers[-1]["id"] == left
    assert trainer.lr == 0.25
    paths = [event["path"] for event in made.events("checkpoint")]
    assert len(paths) == len(set(paths))


def test_requests_that_come_too_late_are_refused(tmp_path: Path):
    with driven(tmp_path / "exp", PlainTrainer()) as made:
        ids = [send(made.folder.root, kind) for kind in ("stop", "pause", "stop")]
        made.join()
    answers = {event["id"]: event for event in made.events("request")}
    assert [answers[id_]["status"] for id_ in ids] == ["applied", "refused", "refused"]
    assert answers[ids[1]]["reason"] == "the run is ending: asked from python"
    assert made.events("state")[-1]["state"] == "stopped"
    with pytest.raises(RunError, match=r"is stopped at step \d+ .*nobody answers pause.*run\.load\(\)"):
        made.run.pause()


def test_a_checkpoint_in_the_background_is_answered_when_it_is_complete(tmp_path: Path):
    with driven(tmp_path / "exp", PlainTrainer(), save_interval=3, keep_last_k=2, async_save=True) as made:
        wait_for(lambda: made.trainer.global_step > 10)
        made.run.pause().wait()
        request = made.run.checkpoint().wait()
        store = CheckpointStore(made.folder.checkpoints)
        assert store.newest().step == request.step == made.trainer.global_step
        steps = [event["step"] for event in made.events("checkpoint")]
        assert steps[:4] == [0, 3, 6, 9]
        assert len(store.complete()) == 2


def test_a_failure_is_recorded_with_its_trace(tmp_path: Path):
    with driven(tmp_path / "exp", PlainTrainer(fail_at=4)) as made:
        made.join()
        assert isinstance(made.error, ValueError)
        (event,) = made.events("error")
        assert (event["step"], event["message"]) == (3, "ValueError: the toy broke")
        assert "in step" in event["traceback"]
        status = made.run.status
        assert (status["state"], status["reason"], status["alive"]) == ("failed", "ValueError: the toy broke", False)
        assert made.run.metrics.index.tolist() == [1, 2, 3]


def test_open_requests_are_answered_when_the_run_fails(tmp_path: Path):
    with driven(tmp_path / "exp", PlainTrainer(fail_at=30)) as made:
        made.run.pause().wait()
        request = made.run.step(100)
        made.join()
        assert request.state == "applied"
        assert "ValueError: the toy broke" in request.reason


def test_a_failing_background_save_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with driven(tmp_path / "exp", PlainTrainer(), save_interval=3, async_save=True) as made:
        monkeypatch.setattr("rlkit.runs.checkpoint._write_json", broken)
        made.join()
        assert isinstance(made.error, PermissionError)
        assert made.run.state == "failed"


def test_a_run_without_a_checkpoint_does_not_begin(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.config.write_text("{}")
    with pytest.raises(Exception, match="no complete checkpoint"):
        RunLoop(PlainTrainer(), folder, total_steps=1, policy=CheckpointPolicy()).run()
    assert json.loads(folder.status.read_text())["state"] == "failed"
