"""What a view reads out of a run folder."""

import math
from pathlib import Path

import pytest

from rlkit.cli.view import RunView, Series
from rlkit.errors import RunError
from rlkit.runs import events
from rlkit.runs.protocol import StepMetrics
from tests.cli.fake_run import FakeRun


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "exp")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        RunView(tmp_path)


def test_it_reads_only_what_is_new(run: FakeRun) -> None:
    run.take_steps(3)
    view = RunView(run.folder.root)
    assert list(view.series["reward/mean"].steps) == [1, 2, 3]
    run.take_steps(2)
    new = view.update()
    assert [event["step"] for event in new if event["type"] == "metrics"] == [4, 5]
    assert list(view.series["reward/mean"].values) == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])


def test_the_driver_is_alive_only_while_it_holds_the_run(run: FakeRun) -> None:
    view = RunView(run.folder.root)
    assert (view.alive, view.state) == (False, "failed")
    with run.serve():
        view.update()
        assert (view.alive, view.state) == (True, "running")


def test_remaining_time_is_steps_left_times_the_recent_pace(run: FakeRun) -> None:
    with run.serve():
        run.take_steps(12)
        view = RunView(run.folder.root)
        times = [13_800 + 300 * math.sin(n / 3) for n in range(3, 13)]
        assert view.seconds_per_step == pytest.approx(sum(times) / 10 / 1e3)
        assert view.remaining == pytest.approx(28 * sum(times) / 10 / 1e3)


def test_key_metrics_come_first_and_terms_are_shown_elsewhere(run: FakeRun) -> None:
    run.take_steps(1)
    view = RunView(run.folder.root)
    names = view.key_metrics()
    assert names[:3] == ["reward/mean", "kl/per_token", "rollout/response_length"]
    assert "reward/sentiment" not in names
    assert "memory/process_rss_mb" not in names
    assert len(names) == len(set(names))
    assert view.key_metrics(["memory/*", "reward/s*"]) == ["memory/process_rss_mb", "reward/sentiment"]


def test_samples_are_those_of_the_latest_step_best_first(run: FakeRun) -> None:
    view = RunView(run.folder.root)
    assert view.samples() is None
    run.take_steps(2)
    view.update()
    found = view.samples()
    assert found is not None
    step, rows = found
    assert step == 2
    assert [row["reward"] for row in rows] == sorted((row["reward"] for row in rows), reverse=True)
    assert rows[0]["response"].endswith("number 0 of step 2.")


def test_values_that_are_not_finite_stay_what_they_are(run: FakeRun) -> None:
    run.log.write(events.metrics(StepMetrics(1, {"train/loss": math.inf, "kl/per_token": math.nan})))
    view = RunView(run.folder.root)
    assert view.series["train/loss"].last == math.inf
    assert math.isnan(view.series["kl/per_token"].last)


def test_steps_reported_again_replace_the_old_ones() -> None:
    series = Series()
    for step in (1, 2, 3, 4, 3):
        series.add(step, step if len(series.steps) < 4 else 30.0)
    assert list(series.steps) == [1, 2, 3]
    assert list(series.values) == [1, 2, 30]
