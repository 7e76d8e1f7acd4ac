"""The dashboard of `rlkit watch`, drawn into text."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from rlkit.cli.frame import frame
from rlkit.cli.view import RunView
from rlkit.runs import events
from tests.cli.fake_run import FakeRun


def draw(view: RunView, width: int = 140, height: int = 40, metrics: tuple[str, ...] = ()) -> str:
    console = Console(width=width, height=height, file=io.StringIO())
    console.print(frame(view, width, height, metrics), height=height)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_in_full(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "exp")
    with run.serve():
        run.take_steps(10)
        run.answer("set", {"reward_weights": {"brevity": 0.5}}, "applied")
        run.answer("set", {"lr": -1}, "refused", "lr must be at least 0")
        run.take_steps(10)
        text = draw(RunView(run.folder.root))
    lines = text.splitlines()
    assert len(lines) == 40
    assert max(map(len, lines)) == 140
    assert "running" in text
    assert "step 20 of 40" in text
    assert "left" in text
    assert "actor 60%" in text  # 8.4 s of 13.9 s
    assert "reward/mean  0.2" in text
    assert "kl/per_token  0.02" in text
    assert "▲" in text
    assert "reward_weights.brevity=0.5" in text
    assert "refused" in text
    assert "lr must be" in text
    assert "responses of step 20" in text
    assert "number 0 of step 20." in text
    assert "q leaves, the run goes on" in text


def test_the_mark_stands_under_the_step_of_the_change(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "exp")
    run.take_steps(11)
    run.answer("set", {"lr": 1e-6}, "applied")
    run.take_steps(10)
    text = draw(RunView(run.folder.root), metrics=("reward/mean",))
    line = next(line for line in text.splitlines() if "▲" in line)
    first, mark, last = line.index("1"), line.index("▲"), line.index("21") + 1
    assert mark - first == pytest.approx((last - first) / 2, abs=1)


@pytest.mark.parametrize(("width", "height"), [(140, 40), (100, 24), (80, 24), (60, 20), (30, 8)])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_it_draws_at_any_size(tmp_path: Path, width: int, height: int, steps: int) -> None:
    run = FakeRun(tmp_path / "exp")
    run.take_steps(steps)
    lines = draw(RunView(run.folder.root), width, height).splitlines()
    assert len(lines) == height
    assert max(map(len, lines)) <= width


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "exp", state="failed")
    run.log.write(events.error(0, "RewardError: sentiment returned nan for sample 3", "Traceback ..."))
    run.write_status()
    text = draw(RunView(run.folder.root))
    assert "failed" in text
    assert "sentiment returned nan for sample 3" in text
    assert "the run goes on" not in text


def test_a_dead_driver_is_seen(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "exp")
    text = draw(RunView(run.folder.root))
    assert "failed" in text
    assert "no longer holds the run" in text
