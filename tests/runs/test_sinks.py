"""Sinks: what was written is read back by other software."""

import errno
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlkit.errors import ConfigError
from rlkit.runs.layout import RunFolder
from rlkit.runs.protocol import Span, StepMetrics
from rlkit.runs.sinks import CsvSink, EventSink, TensorBoardSink, check_sinks


def test_events_hold_metrics_and_spans(tmp_path: Path):
    sink = EventSink(RunFolder(tmp_path))
    sink.write(StepMetrics(3, {"a/x": 1.5, "a/n": math.nan}, [Span("actor", 10.0, 0.5, 1)]))
    sink.close()
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert first["metrics"] == {"a/x": 1.5, "a/n": None}
    assert first["nonfinite"] == {"a/n": "nan"}
    assert second["spans"] == [{"name": "actor", "start": 10.0, "duration_s": 0.5, "rank": 1}]


def test_a_csv_gets_a_column_when_a_metric_appears(tmp_path: Path):
    path = tmp_path / "metrics.csv"
    sink = CsvSink(path)
    sink.write(StepMetrics(1, {"a/x": 0.1, "b,c": math.inf}))
    sink.write(StepMetrics(2, {"late": 7.0, "a/x": 0.2}))
    sink.close()
    CsvSink(path).write(StepMetrics(3, {"a/x": 0.3}))
    assert path.read_text().splitlines() == ['step,a/x,"b,c",late', "1,0.1,inf,", "2,0.2,,7.0", "3,0.3,,"]
    assert pd.read_csv(path)["a/x"].tolist() == [0.1, 0.2, 0.3]


def test_tensorboard_reads_what_was_written(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write(StepMetrics(1, {"a/x": 0.5, "a/n": math.nan}))
    sink.write(StepMetrics(2, {"a/x": 0.25}))
    sink.close()
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert board.Tags()["scalars"] == ["a/x"]
    assert [(point.step, point.value) for point in board.Scalars("a/x")] == [(1, 0.5), (2, 0.25)]
    assert TensorBoardSink(tmp_path).path != sink.path


@pytest.mark.parametrize("sink", ["csv", "tensorboard"])
def test_a_step_that_did_not_fit_can_be_written_again(tmp_path: Path, sink: str, monkeypatch: pytest.MonkeyPatch):
    made: Any = CsvSink(tmp_path / "m.csv") if sink == "csv" else TensorBoardSink(tmp_path)
    made.write(StepMetrics(1, {"a/x": 1.0}))
    before = made.path.read_bytes()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(OSError, match="No space"):
            made.write(StepMetrics(2, {"a/x": 2.0}))
    assert made.path.read_bytes() == before
    made.write(StepMetrics(2, {"a/x": 2.0}))
    assert made.path.read_bytes().startswith(before)
    assert len(made.path.read_bytes()) > len(before)


def test_names_are_checked():
    assert check_sinks("csv") == ("csv",)
    assert check_sinks(["csv", "tensorboard", "csv"]) == ("csv", "tensorboard")
    with pytest.raises(ConfigError, match="no 'tensorbord'; known: tensorboard, csv"):
        check_sinks(["tensorbord"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        check_sinks(["tensorboard"])


def test_tensorboard_is_written_without_torch(tmp_path: Path):
    script = f"""
import sys
from rlkit.runs.sinks import TensorBoardSink
from rlkit.runs.protocol import StepMetrics
TensorBoardSink({str(tmp_path)!r}).write(StepMetrics(1, {{"a": 1.0}}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
