"""Requests from the terminal: how they are written, and what becomes of them."""

from pathlib import Path
from typing import Any

import pytest

from rlkit.cli.main import fill_track_metrics, main, parse_sinks
from rlkit.cli.steer import parse_changes
from rlkit.errors import ConfigError
from tests.cli.fake_run import FakeRun


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "exp")


def call(*arguments: str | Path) -> int:
    """Exit code of a command line."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("items", "changes"),
    [
        (["lr=1e-6"], {"lr": 1e-6}),
        (["lr=.5"], {"lr": 0.5}),
        (["kl_target=None"], {"kl_target": None}),
        (["kl_target=null", "top_k=50"], {"kl_target": None, "top_k": 50}),
        (["whiten=true"], {"whiten": True}),
        (["name=a=b"], {"name": "a=b"}),
        (
            ["reward_weights.brevity=0.5", "reward_weights.tone=1", "lr=2e-5"],
            {"reward_weights": {"brevity": 0.5, "tone": 1}, "lr": 2e-5},
        ),
        (['reward_weights={"tone": 2}'], {"reward_weights": {"tone": 2}}),
    ],
)
def test_changes_are_read(items: list[str], changes: dict[str, Any]) -> None:
    assert parse_changes(items) == changes


@pytest.mark.parametrize("items", [["lr"], ["=1"], ["a..b=1"], ["lr=1", "lr=2"], ["a=1", "a.b=2"], ["a.b=2", "a=1"]])
def test_changes_that_make_no_sense_are_refused(items: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_changes(items)


def test_set_waits_until_it_is_applied(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.take_steps(12)
    with run.serve() as served:
        assert call("set", run.folder.root, "lr=1e-6", "reward_weights.brevity=0.5") == 0
    assert served.requests == [("set", {"lr": 1e-6, "reward_weights": {"brevity": 0.5}}, "cli")]
    assert run.settings["reward_weights"] == {"sentiment": 1.0, "brevity": 0.5}
    assert capsys.readouterr().out == "set lr=1e-06 reward_weights.brevity=0.5: applied at step 12\n"


def test_a_refusal_is_one_line_and_exit_code_1(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    with run.serve():
        assert call("set", run.folder.root, "learning_rate=1") == 1
    assert capsys.readouterr().err == (
        "error: set learning_rate=1 was refused at step 0: there is no live setting 'learning_rate'\n"
    )


@pytest.mark.parametrize(
    ("command", "sent"),
    [
        (["pause"], ("pause", {}, "cli")),
        (["resume"], ("resume", {}, "cli")),
        (["checkpoint"], ("checkpoint", {}, "cli")),
        (["step", "3"], ("step", {"n": 3}, "cli")),
        (["step"], ("step", {"n": 1}, "cli")),
        (["stop"], ("stop", {}, "cli")),
    ],
)
def test_each_request_reaches_the_run(
    run: FakeRun, capsys: pytest.CaptureFixture[str], command: list[str], sent: tuple[str, dict[str, Any], str]
) -> None:
    name, *rest = command
    with run.serve() as served:
        assert call(name, run.folder.root, *rest) == 0
    assert served.requests == [sent]
    out = capsys.readouterr().out
    assert "applied at step" in out
    if name == "stop":
        assert out.endswith("stopped at step 0\n")


def test_nothing_is_sent_to_a_run_that_nobody_drives(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("pause", run.folder.root) == 1
    assert "nothing drives it any more" in capsys.readouterr().err
    assert not run.folder.control.exists()


def test_a_finished_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path / "done", state="finished")
    assert call("set", run.folder.root, "lr=1") == 1
    assert "done is finished at step 0" in capsys.readouterr().err


def test_a_run_that_does_not_answer_in_time(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    with run.lock:
        assert call("pause", run.folder.root, "--timeout", "0.2") == 1
    assert "pause was not answered within 0.2 s; it is still pending" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["watch", "attach", "pause", "stop", "checkpoint"])
def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert call(command, tmp_path) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "is not a run folder" in err
    assert len(err.splitlines()) == 1


def test_sinks_on_the_command_line() -> None:
    assert parse_sinks("tensorboard,csv") == ("tensorboard", "csv")
    assert parse_sinks("") == ()
    with pytest.raises(ConfigError, match="tensorboard or csv"):
        parse_sinks("wandb")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["run", "a.py", "--track_metrics"], ["run", "a.py", "--track_metrics", "tensorboard,csv"]),
        (["run", "--track-metrics", "a.py"], ["run", "--track-metrics", "tensorboard,csv", "a.py"]),
        (["run", "--track_metrics", "csv", "a.py"], ["run", "--track_metrics", "csv", "a.py"]),
        (
            ["run", "a.py", "--track_metrics", "--watch"],
            ["run", "a.py", "--track_metrics", "tensorboard,csv", "--watch"],
        ),
    ],
)
def test_the_flag_alone_means_both_sinks(given: list[str], read: list[str]) -> None:
    assert fill_track_metrics(given) == read
