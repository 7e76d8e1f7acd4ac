"""Requests: their form, and that each is handed out once."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlkit.errors import RequestRefused, RunError
from rlkit.runs.control import ControlReader, check_changes, send, step_count
from rlkit.runs.layout import RunFolder, write_status

SETTINGS: dict[str, Any] = {
    "lr": 1e-5,
    "top_k": 0,
    "greedy": False,
    "mode": "fast",
    "limit": None,
    "reward_weights": {"brevity": 1.0, "joy": 0.5},
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.config.write_text("{}")
    write_status(folder, {"state": "running"})
    return folder


def test_requests_come_in_order_and_once(folder: RunFolder):
    reader = ControlReader(folder)
    first = send(folder.root, "pause")
    second = send(folder.root, "set", {"lr": np.float64(0.5), "reward_weights": {"joy": 1}}, "widget")
    lines = list(reader.poll())
    assert [(line.id, line.kind, line.args, line.source) for line in lines] == [
        (first, "pause", {}, "python"),
        (second, "set", {"lr": 0.5, "reward_weights": {"joy": 1}}, "widget"),
    ]
    assert list(reader.poll()) == []


def test_answered_requests_do_not_come_again_after_a_restart(folder: RunFolder):
    answered, pending = send(folder.root, "pause"), send(folder.root, "resume")
    with open(folder.control, "ab") as stream:
        stream.write(b"not json\n")
    place = next(line.id for line in ControlReader(folder).poll() if line.kind == "unreadable")
    assert place.startswith("line@")
    assert [line.id for line in ControlReader(folder, {answered, place}).poll()] == [pending]


def test_a_request_that_is_there_twice_is_one(folder: RunFolder):
    send(folder.root, "pause")
    folder.control.write_bytes(folder.control.read_bytes() * 2)
    assert len(list(ControlReader(folder).poll())) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{nope", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"kind": "pause"}', "needs an id"),
        ('{"id": "a", "kind": "pauze"}', "unknown kind of request 'pauze' (did you mean 'pause'?)"),
        ('{"id": "a", "kind": ["pause"]}', "unknown kind of request"),
        ('{"id": "a", "kind": "set", "args": [1]}', "args must be an object, got list"),
    ],
)
def test_a_line_of_the_wrong_form_says_what_is_wrong(folder: RunFolder, line: str, problem: str):
    folder.control.write_text(line + "\n" + json.dumps({"id": "b", "kind": "pause"}) + "\n")
    bad, good = ControlReader(folder).poll()
    assert problem in bad.problem
    assert good.problem == ""


def test_a_torn_request_waits_for_its_end(folder: RunFolder):
    folder.control.write_bytes(b'{"id": "a", "kind": "pau')
    reader = ControlReader(folder)
    assert list(reader.poll()) == []
    with open(folder.control, "ab") as stream:
        stream.write(b'se"}\n')
    assert [line.kind for line in reader.poll()] == ["pause"]


def test_only_runs_take_requests(tmp_path: Path, folder: RunFolder):
    with pytest.raises(RunError, match="no run folder"):
        send(tmp_path / "gone", "pause")
    with pytest.raises(RunError, match="python, widget, cli"):
        send(folder.root, "pause", source="mail")


def test_a_request_with_nan_arrives_as_nan(folder: RunFolder):
    send(folder.root, "set", {"lr": math.nan})
    (line,) = ControlReader(folder).poll()
    assert math.isnan(line.args["lr"])


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 1},
        {"lr": 0.5, "top_k": 3},
        {"greedy": True},
        {"mode": "slow"},
        {"limit": 2.0},
        {"limit": None},
        {"reward_weights": {"joy": 0}},
    ],
)
def test_changes_of_the_right_type_pass(changes: dict[str, Any]):
    check_changes(changes, SETTINGS)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "at least one setting"),
        ({"lrr": 1}, "unknown setting 'lrr' (did you mean 'lr'?); live settings: lr, top_k"),
        ({"lr": math.nan}, "lr must be a finite number; got nan"),
        ({"lr": math.inf}, "lr must be a finite number; got inf"),
        ({"lr": "fast"}, "lr must be a number (now 1e-05); got 'fast'"),
        ({"lr": True}, "lr is float (now 1e-05); got True"),
        ({"greedy": 1}, "greedy is bool (now False); got 1"),
        ({"mode": 3}, "mode must be text (now 'fast'); got 3"),
        ({"reward_weights": 3}, "reward_weights takes a mapping of brevity, joy; got 3"),
        ({"reward_weights": {}}, "reward_weights takes a mapping"),
        ({"reward_weights": {"jo": 1}}, "reward_weights has no 'jo' (did you mean 'joy'?); known: brevity, joy"),
        ({"reward_weights": {"joy": math.nan}}, "reward_weights['joy'] must be a finite number"),
        ({"reward_weights": {"joy": "1"}}, "reward_weights['joy'] must be a number"),
    ],
)
def test_changes_that_cannot_be_are_refused_with_the_reason(changes: dict[str, Any], problem: str):
    with pytest.raises(RequestRefused) as caught:
        check_changes(changes, SETTINGS)
    assert problem in str(caught.value)


def test_steps_are_counted_from_one():
    assert step_count({}) == 1
    assert step_count({"n": 3}) == 3
    for args in ({"n": 0}, {"n": 1.5}, {"n": True}, {"n": "2"}, {"m": 1}):
        with pytest.raises(RequestRefused, match="whole number of at least 1"):
            step_count(args)
