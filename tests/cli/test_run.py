"""`rlkit run`: what it asks of the trainer, and a real run started, watched, steered and stopped from a terminal."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.runs.handle import attach
from tests.cli.test_steer import call

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("tiny_script.py")

RECORDER = """
import json, sys
class Run:
    status = {"state": "running", "pid": 7}
class Trainer:
    def start(self, *args, **kwargs):
        print(json.dumps(["start", args, kwargs, sys.argv[1:]]))
        return Run()
    def train(self, *args, **kwargs):
        print(json.dumps(["train", args, kwargs, sys.argv[1:]]))
    def step(self): ...
trainer = Trainer()
"""


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ([], '["start", ["runs/experiment", null], {}, []]'),
        (["--steps", "3", "--dir", "here"], '["start", ["here", 3], {}, []]'),
        (["--track_metrics", "csv"], '["start", ["runs/experiment", null], {"track_metrics": ["csv"]}, []]'),
        (["--replace"], '["start", ["runs/experiment", null], {"replace": true}, []]'),
        (["--foreground", "--steps", "3"], '["train", [3, "runs/experiment"], {}, []]'),
        (["--", "--fast", "9"], '["start", ["runs/experiment", null], {}, ["--fast", "9"]]'),
    ],
)
def test_what_is_asked_of_the_trainer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    asked: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    (tmp_path / "experiment.py").write_text(RECORDER)
    assert call("run", "experiment.py", *options) == 0
    assert capsys.readouterr().out.splitlines()[0] == asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "nothing.py is not a Python file"),
        ([SCRIPT, "--track_metrics", "wandb"], "--track_metrics takes tensorboard or csv"),
        ([SCRIPT, "--foreground", "--watch"], "--watch is for runs that go on in the background"),
        ([SCRIPT, "--foreground", "--replace"], "--replace is for runs that go on in the background"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str | Path], message: str) -> None:
    assert call("run", *arguments) == 1
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_run_from_a_terminal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "rlkit.cli.main", "run", str(SCRIPT), "--dir", "runs/tiny", "--track_metrics"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    started = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert started.returncode == 0, started.stderr
    assert started.stdout.startswith("started runs/tiny (")
    run = attach("runs/tiny")
    try:
        assert call("set", "runs/tiny", "reward_weights.brevity=0.5", "lr=1e-4") == 0
        answer = r"set reward_weights\.brevity=0\.5 lr=0\.0001: applied at step \d+\n"
        assert re.fullmatch(answer, capsys.readouterr().out)
        assert run.settings["reward_weights"] == {"goodness": 1.0, "brevity": 0.5}
        assert call("set", "runs/tiny", "reward_weights.tone=1") == 1
        assert "known: goodness, brevity" in capsys.readouterr().err
        assert call("pause", "runs/tiny") == 0
        paused_at = run.step_count
        assert call("step", "runs/tiny", "2") == 0
        assert call("watch", "runs/tiny", "--once") == 0
        assert call("ls") == 0
        assert call("stop", "runs/tiny") == 0
        out = capsys.readouterr().out
    finally:
        if run.alive:
            run.stop()
    assert f"step 2: applied at step {paused_at + 2}\n" in out
    assert "responses of step" in out
    assert re.search(rf"tiny +paused +{paused_at + 2} ", out)
    assert out.splitlines()[-1] == f"stopped at step {paused_at + 2}"
    assert len(run.metrics) == paused_at + 2
    assert len((run.dir / "metrics.csv").read_text().splitlines()) >= paused_at + 2
    assert list((run.dir / "tensorboard").iterdir())
