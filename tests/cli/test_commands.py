"""The commands that show: ls, attach, watch, lab."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from rlkit.cli import lab
from tests.cli.fake_run import FakeRun
from tests.cli.test_steer import call


def test_ls_shows_each_run_below_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeRun(tmp_path / "first", state="finished").take_steps(4)
    second = FakeRun(tmp_path / "more" / "second")
    (tmp_path / "no_run").mkdir()
    with second.serve():
        second.take_steps(2)
        assert call("ls", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert rows["first"][:3] == ["finished", "4/40", "0.04"]
    assert rows["more/second"][:3] == ["running", "2/40", "0.02"]


def test_ls_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("ls", tmp_path) == 0
    assert "no runs below" in capsys.readouterr().out
    assert call("ls", tmp_path / "missing") == 1
    assert "there is no folder" in capsys.readouterr().err


def test_attach_sums_up_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path / "exp", state="finished")
    run.take_steps(7)
    run.answer("set", {"lr": 1e-6}, "applied")
    run.write_status(reason="all 7 steps are done")
    assert call("attach", run.folder.root) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "exp  finished  step 7 of 40"
    assert "all 7 steps are done" in out
    assert "reward/mean 0.07" in out
    assert "reward_weights.brevity=0.25" in out
    assert "step 7  applied  set lr=1e-06  cli" in out


def test_attach_follows_until_the_run_ends(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "exp")
    with run.serve():
        run.take_steps(1)
        command = [sys.executable, "-u", "-m", "rlkit.cli.main", "attach", str(run.folder.root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("exp  running  step 1 of 40")
            run.take_steps(2)
            run.answer("pause", {}, "applied")
            time.sleep(1.2)
            run.state = "stopped"
            run.write_status()
            out = process.stdout.read()
    assert process.returncode == 0
    assert "step 2     reward/mean" in out
    assert "step 3     applied  pause  cli" in out
    assert out.splitlines()[-1] == "stopped at step 3"


def test_watch_once_prints_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun(tmp_path / "exp")
    run.take_steps(3)
    assert call("watch", run.folder.root, "--once", "--metrics", "kl/*") == 0
    out = capsys.readouterr().out
    assert "kl/per_token  0.003" in out
    assert "reward/mean" not in out


class Terminal:
    """A command on a pseudo-terminal of 120 x 36."""

    def __init__(self, *arguments: str) -> None:
        self.fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "36"}
        command = [sys.executable, "-m", "rlkit.cli.main", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=child,
            stdout=child,
            stderr=child,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C needs it
        )
        os.close(child)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 30.0) -> None:
        """Read the screen until `text` has been written to it."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} did not appear; the end of the screen: {self.seen[-500:]!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += os.read(self.fd, 1 << 16).decode(errors="replace")

    def press(self, key: str) -> int:
        """Press a key that ends the command; returns its exit code."""
        os.write(self.fd, key.encode())
        deadline = time.monotonic() + 10
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.fd, 1 << 16).decode(errors="replace")
                except OSError:
                    break
        code = self.process.wait(timeout=10)
        os.close(self.fd)
        return code


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_watch_is_live_and_leaving_it_leaves_the_run_alone(tmp_path: Path, key: str) -> None:
    run = FakeRun(tmp_path / "exp")
    with run.serve() as served:
        run.take_steps(5)
        terminal = Terminal("watch", str(run.folder.root))
        terminal.wait_for("responses of step 5")
        run.take_steps(1)
        terminal.wait_for("responses of step 6")
        assert terminal.press(key) == 0
        assert served.requests == []
    assert "Traceback" not in terminal.seen
    assert terminal.seen.rindex("\x1b[?1049l") > terminal.seen.rindex("\x1b[?1049h")  # the screen was given back


def test_lab_opens_the_examples_of_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: calls.append(arguments))
    notebook = tmp_path / "mine.ipynb"
    notebook.touch()
    lab.open_lab(notebook, ["--no-browser"])
    assert calls[0][1:5] == ["-m", "jupyterlab", str(notebook), "--no-browser"]
    assert call("lab", tmp_path / "missing.ipynb") == 1
    assert len(calls) == 1
