"""Reading a run: incremental, tolerant of torn and bad lines; thinning for display."""

import math
import random
import time
from pathlib import Path

import pytest

from rlkit.errors import RunError
from rlkit.runs import events
from rlkit.runs.layout import RunFolder, write_status
from rlkit.runs.log import LineWriter
from rlkit.runs.protocol import Span, StepMetrics
from rlkit.runs.reader import RunReader, decimate


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.config.write_text('{"algorithm": "toy"}')
    write_status(folder, {"state": "running", "step": 1})
    return folder


def test_small_files_are_read(folder: RunFolder):
    reader = RunReader(folder.root)
    assert reader.config() == {"algorithm": "toy"}
    assert reader.dataflow() == {}
    assert reader.status() == {"state": "running", "step": 1}
    with pytest.raises(RunError, match="no run folder"):
        RunReader(folder.root / "gone")


def test_events_are_polled_once_and_bad_lines_are_counted(folder: RunFolder):
    reader = RunReader(folder.root)
    assert reader.poll() == []
    writer = LineWriter(folder.events)
    writer.write(events.state("running", 0))
    assert [event["state"] for event in reader.poll()] == ["running"]
    with open(folder.events, "ab") as stream:
        stream.write(b'{"type":"state"\n{"type":"state","state":"pau')
    assert reader.poll() == []
    assert reader.bad_lines == 1
    with open(folder.events, "ab") as stream:
        stream.write(b'sed"}\n')
    assert [event["state"] for event in reader.poll()] == ["paused"]


def test_metrics_become_columns_with_gaps_and_non_finite_values(folder: RunFolder):
    writer, reader = LineWriter(folder.events), RunReader(folder.root)
    assert reader.metrics().empty
    writer.write(events.metrics(StepMetrics(1, {"a/x": 1.0, "a/n": math.nan})))
    writer.write(events.spans(1, [Span("actor", 0.0, 1.0)]))
    writer.write(events.metrics(StepMetrics(2, {"a/x": 2.0, "a/late": math.inf, "a/n": -math.inf})))
    frame = reader.metrics()
    assert frame.index.tolist() == [1, 2]
    assert frame.index.name == "step"
    assert frame["a/x"].tolist() == [1.0, 2.0]
    assert frame["a/late"].tolist()[1] == math.inf
    assert math.isnan(frame["a/late"].tolist()[0])
    assert frame["a/n"].tolist()[1] == -math.inf
    assert all(dtype == "float64" for dtype in frame.dtypes)
    writer.write(events.metrics(StepMetrics(3, {"a/late": 5.0})))
    assert reader.metrics()["a/late"].tolist()[2] == 5.0
    assert math.isnan(reader.metrics()["a/x"].tolist()[2])
    assert len(reader.poll()) == 4  # a frame does not take events away from poll


def test_a_step_that_was_taken_again_counts_as_it_was_last(folder: RunFolder):
    writer = LineWriter(folder.events)
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (3, 30.0)):
        writer.write(events.metrics(StepMetrics(step, {"a/x": value})))
    frame = RunReader(folder.root).metrics()
    assert frame.index.tolist() == [1, 2, 3]
    assert frame["a/x"].tolist() == [1.0, 20.0, 30.0]


def test_a_request_is_pending_until_its_answer_is_there(folder: RunFolder):
    writer, reader = LineWriter(folder.events), RunReader(folder.root)
    assert reader.answer("a") is None
    writer.write(events.request("a", "set", {"lr": math.nan}, "refused", 4, "no", "cli"))
    answer = reader.answer("a")
    assert answer is not None
    assert (answer["status"], answer["step"], answer["reason"], answer["args"]) == ("refused", 4, "no", {"lr": "nan"})


def test_a_hundred_thousand_steps_are_read_and_framed(folder: RunFolder):
    writer, reader = LineWriter(folder.events), RunReader(folder.root)
    with open(folder.events, "w") as stream:
        for step in range(100_000):
            values = ",".join(f'"area/metric_{number}":{step / 7!r}' for number in range(3))
            stream.write(f'{{"type":"metrics","time":0,"step":{step},"metrics":{{{values}}}}}\n')
    frame = reader.metrics()
    assert frame.shape == (100_000, 3)
    assert frame.iloc[-1].tolist() == [99_999 / 7] * 3
    writer.write(events.metrics(StepMetrics(100_000, {"area/metric_0": 1.0})))
    began = time.perf_counter()
    assert len(reader.metrics()) == 100_001
    assert time.perf_counter() - began < 2.0  # reads one line and builds a frame: about 20 ms


def test_thinning_keeps_every_spike_and_both_ends():
    rng = random.Random(0)
    ys = [rng.random() for _ in range(10_000)]
    ys[1234], ys[8765] = 50.0, -50.0
    xs, kept = decimate(range(10_000), ys, 200)
    assert len(xs) <= 200
    assert (xs[0], xs[-1]) == (0, 9_999)
    assert xs == sorted(set(xs))
    assert kept == [ys[int(x)] for x in xs]
    assert {50.0, -50.0} <= set(kept)
    buckets = [ys[1 + 9998 * b // 99 : 1 + 9998 * (b + 1) // 99] for b in range(99)]
    assert sum(max(bucket) in kept and min(bucket) in kept for bucket in buckets) >= 97


def test_thinning_leaves_short_curves_alone_and_nan_shows_as_a_gap():
    assert decimate([1, 2, 3], [1.0, math.nan, 3.0], 4)[0] == [1, 2, 3]
    xs, ys = decimate(range(100), [1.0] * 40 + [math.nan] * 30 + [2.0] * 30, 20)
    assert any(math.isnan(y) for y in ys)
    assert all(math.isnan(y) == (40 <= x < 70) for x, y in zip(xs, ys, strict=True))


def test_thinning_checks_its_input():
    with pytest.raises(ValueError, match="one length, got 2 and 1"):
        decimate([1, 2], [1.0], 10)
    with pytest.raises(ValueError, match="at least 4, got 3"):
        decimate([1], [1.0], 3)
