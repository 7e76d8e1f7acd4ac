import json
import math
from pathlib import Path

import pytest

from rlkit.errors import RunError
from rlkit.runs.control import ControlReader
from rlkit_widgets.sources import run_folder
from rlkit_widgets.state import RunState
from tests.widgets.fake_run import FakeRun


def test_look_reads_status_settings_and_points(run: FakeRun) -> None:
    for _ in range(3):
        run.take_step()
    state = RunState(run.folder)
    changes = state.look()
    assert changes.status
    assert changes.settings
    assert changes.points
    assert changes.rollouts
    assert (state.status["state"], state.status["step"], state.status["total_steps"]) == ("running", 3, 200)
    assert state.settings["reward_weights"] == {"sentiment": 1.0, "brevity": 0.5}
    assert state.setting_specs["lr"]["doc"] == "Learning rate of the policy."
    assert len(state.series["kl/per_token"]) == 3
    assert state.rollout_steps == [1, 2, 3]
    assert state.driven
    assert not state.final


def test_a_second_look_reads_only_what_is_new(run: FakeRun) -> None:
    run.take_step()
    state = RunState(run.folder)
    state.look()
    changes = state.look()
    assert not any((changes.points, changes.settings, changes.rollouts, changes.requests))
    run.take_step(extra={"train/new_name": 1.5})
    assert state.look().points
    assert list(state.series["train/new_name"].points()[1]) == [1.5]


def test_a_torn_last_line_waits_and_a_bad_line_is_skipped(run: FakeRun) -> None:
    state = RunState(run.folder)
    state.look()
    line = json.dumps({"type": "metrics", "time": 1.0, "step": 1, "metrics": {"loss": 0.25}}).encode()
    with open(run.folder.events, "ab") as stream:
        stream.write(b"not json\n" + line[:20])
    assert not state.look().points
    with open(run.folder.events, "ab") as stream:
        stream.write(line[20:] + b"\n")
    assert state.look().points
    assert list(state.series["loss"].points()[1]) == [0.25]


def test_values_that_are_not_finite_are_gaps_with_a_name(run: FakeRun) -> None:
    run.take_step(extra={"train/loss": math.inf, "train/grad": math.nan})
    state = RunState(run.folder)
    state.look()
    assert math.isnan(state.series["train/loss"].points()[1][0])
    assert state.nonfinite == {"train/loss": (1, "inf"), "train/grad": (1, "nan")}


def test_only_the_metrics_asked_for_are_kept(run: FakeRun) -> None:
    run.take_step()
    kept = RunState(run.folder, ["reward/*", "entropy"])
    kept.look()
    assert set(kept.series) == {
        "reward/sentiment",
        "reward/brevity",
        "reward/mean",
        "reward/std",
        "reward/latency_ms",
        "train/entropy",
    }
    none = RunState(run.folder, ())
    none.look()
    assert not none.series


def test_a_request_is_written_pending_and_then_answered(run: FakeRun) -> None:
    state = RunState(run.folder)
    state.look()
    note = state.request("set", {"lr": 2e-6})
    (line,) = ControlReader(run.folder).poll()
    assert (line.id, line.kind, line.args, line.source) == (note["id"], "set", {"lr": 2e-6}, "widget")
    assert state.requests[note["id"]]["status"] == "pending"
    run.serve()
    (answer,) = state.look().requests
    assert (answer["id"], answer["status"], answer["step"]) == (note["id"], "applied", 0)
    assert state.settings["lr"] == 2e-6


def test_an_old_status_does_not_undo_newer_settings(run: FakeRun) -> None:
    state = RunState(run.folder)
    state.look()
    old = dict(run.settings)
    run.ask("set", lr=5e-6)
    run.serve()
    run.settings = old
    run.write_status(age=30.0)  # as if the status file had been written before the change
    state.look()
    assert state.settings["lr"] == 5e-6


def test_pace_is_the_mean_of_the_latest_steps(run: FakeRun) -> None:
    state = RunState(run.folder)
    for step in range(1, 6):
        run.events.write({"type": "metrics", "time": 100.0 + 3.0 * step, "step": step, "metrics": {"loss": 1.0}})
    assert state.step_seconds() is None
    state.look()
    assert state.step_seconds() == pytest.approx(3.0)


def test_a_dead_driver_shows_as_failed(run: FakeRun) -> None:
    run.lock.release()
    state = RunState(run.folder)
    state.look()
    assert state.status["state"] == "failed"
    assert "no longer holds the run" in state.status["reason"]
    assert state.final


def test_run_folder_takes_handles_and_paths_and_refuses_the_rest(run: FakeRun, tmp_path: Path) -> None:
    class Handle:
        dir = run.folder.root

    assert run_folder(run.folder.root) == run_folder(str(run.folder.root)) == run_folder(Handle()) == run.folder
    with pytest.raises(TypeError, match="give a Run or the path of its folder, not int"):
        run_folder(7)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="no run folder"):
        run_folder(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    with pytest.raises(RunError, match="not a run folder"):
        run_folder(tmp_path / "other")
