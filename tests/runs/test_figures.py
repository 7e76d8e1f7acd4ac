import gc
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from rlkit.errors import RunError
from rlkit.runs import events, figures
from rlkit.runs.figures import _Plotting, figure
from rlkit.runs.protocol import StepMetrics
from rlkit.runs.reader import RunReader
from tests.widgets.fake_run import FakeRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    fake = FakeRun(tmp_path / "exp")
    yield fake
    fake.lock.release()
    fake.events.close()


def reader_of(run: FakeRun) -> RunReader:
    return RunReader(run.folder.root)


def traces(fig: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in fig.data}


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def test_one_subplot_per_pattern_and_unit(run: FakeRun) -> None:
    for _ in range(4):
        run.take_step(rows=0)
    fig = figure(reader_of(run), "reward/*", "kl")
    assert type(fig) is go.Figure
    titles = [annotation.text for annotation in fig.layout.annotations]
    assert titles == ["reward/*", "reward/* · ms", "kl"]
    drawn = traces(fig)
    assert {name: trace.xaxis for name, trace in drawn.items()} == {
        "reward/std": "x",
        "reward/sentiment": "x",
        "reward/brevity": "x",
        "reward/mean": "x",
        "reward/latency_ms": "x2",
        "kl/coef": "x3",
        "kl/per_token": "x3",
    }
    expected = reader_of(run).metrics()["reward/mean"]
    assert drawn["reward/mean"].x.tolist() == [1, 2, 3, 4]
    assert drawn["reward/mean"].y.tolist() == expected.tolist()


def test_numbers_travel_as_binary(run: FakeRun) -> None:
    run.take_step(rows=0)
    fig = figure(reader_of(run), "kl/coef")
    (trace,) = fig.data
    assert trace.x.dtype == np.int32
    assert trace.y.dtype == np.float64
    assert fig.to_plotly_json()["data"][0]["y"]["dtype"] == "f8"


def test_without_patterns_every_metric_is_there_once(run: FakeRun) -> None:
    run.take_step(rows=0)
    fig = figure(reader_of(run))
    metrics = list(reader_of(run).metrics().columns)
    assert sorted(trace.name for trace in fig.data) == sorted(metrics)
    rewards = {"reward/sentiment", "reward/brevity", "reward/mean", "reward/std"}
    drawn = traces(fig)
    assert len({drawn[name].xaxis for name in rewards}) == 1
    assert len({trace.xaxis for trace in fig.data}) == len(metrics) - len(rewards) + 1


def test_applied_requests_stand_as_marks_and_others_do_not(run: FakeRun) -> None:
    run.take_step(rows=0)
    run.ask("set", reward_weights={"brevity": 0.3}, lr=2e-6)
    run.serve()
    run.take_step(rows=0)
    run.ask("set", reward_weights={"brevty": 0.3})
    run.ask("pause")
    run.serve()
    fig = figure(reader_of(run), "reward/mean", "kl")
    assert [(shape.x0, shape.x1, shape.yref) for shape in fig.layout.shapes] == [
        (1, 1, "y domain"),
        (1, 1, "y2 domain"),
    ]
    assert [shape.label.text for shape in fig.layout.shapes] == ["brevity = 0.3, lr = 2e-06", None]


def test_a_long_run_is_thinned_and_gaps_stay(run: FakeRun) -> None:
    lines = [{"a": math.nan if 100 <= step < 200 else 1.0} for step in range(300)]
    run.events.write(*(events.metrics(StepMetrics(step, line)) for step, line in enumerate(lines)))
    (trace,) = figure(reader_of(run), "a").data
    assert np.isnan(trace.y).sum() == 100
    plotting = _Plotting(reader_of(run), ["a"], limit=50)
    (thinned,) = plotting.draw().data
    assert len(thinned.x) <= 50
    assert np.isnan(thinned.y).any()


def test_errors_name_what_there_is(run: FakeRun) -> None:
    with pytest.raises(RunError, match="no metrics yet"):
        figure(reader_of(run))
    run.take_step(rows=0)
    with pytest.raises(RunError, match=r"no metric matches 'rewrad/\*'; the run has .*reward/mean"):
        figure(reader_of(run), "kl", "rewrad/*")


def test_a_live_figure_follows_the_run_and_ends_with_it(run: FakeRun) -> None:
    for _ in range(2):
        run.take_step(rows=0)
    before = threading.active_count()
    fig = figure(reader_of(run), "reward/*", live=True)
    assert isinstance(fig, go.FigureWidget)
    run.take_step(extra={"reward/novelty": 0.5}, rows=0)
    eventually(lambda: len(traces(fig)["reward/mean"].x) == 3 and "reward/novelty" in traces(fig))
    assert traces(fig)["reward/novelty"].x.tolist() == [3]
    assert traces(fig)["reward/novelty"].xaxis == "x"
    run.set_state("finished")
    eventually(lambda: threading.active_count() == before)
    fig.close()


def test_a_live_figure_waits_for_the_page_before_it_sends_again(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "LIVE_PERIOD_S", 0.02)
    monkeypatch.setattr(figures, "ACKNOWLEDGED_WITHIN_S", 600.0)
    run.take_step(rows=0)
    fig = figure(reader_of(run), "kl/coef", live=True)
    run.take_step(rows=0)
    eventually(lambda: fig._trace_edit_in_process)
    sent, drawn = fig._last_trace_edit_id, len(fig.data[0].x)
    for _ in range(5):
        run.take_step(rows=0)
    time.sleep(0.5)
    assert (fig._last_trace_edit_id, len(fig.data[0].x)) == (sent, drawn)
    fig._js2py_traceDeltas = {"trace_deltas": [], "trace_edit_id": sent}  # the page has drawn it
    eventually(lambda: len(fig.data[0].x) == 7)
    assert fig._last_trace_edit_id == sent + 1
    fig.close()


def test_a_page_that_never_answers_is_not_waited_for_for_ever(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "LIVE_PERIOD_S", 0.02)
    monkeypatch.setattr(figures, "ACKNOWLEDGED_WITHIN_S", 0.1)
    run.take_step(rows=0)
    fig = figure(reader_of(run), "kl/coef", live=True)
    run.take_step(rows=0)
    eventually(lambda: len(fig.data[0].x) == 2)
    run.take_step(rows=0)
    eventually(lambda: len(fig.data[0].x) == 3)
    fig.close()


def test_closing_or_dropping_a_live_figure_ends_its_thread(run: FakeRun) -> None:
    run.take_step(rows=0)
    before = set(threading.enumerate())
    fig = figure(reader_of(run), "kl", live=True)
    (started,) = set(threading.enumerate()) - before
    fig.close()
    del fig
    gc.collect()
    eventually(lambda: not started.is_alive())


def test_plotly_is_imported_only_when_a_figure_is_drawn() -> None:
    code = "import sys, rlkit.runs.figures; assert 'plotly' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
