"""A disk without room pauses the run; its state is kept and nothing of its log is lost."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.errors import RequestRefused
from rlkit.runs.checkpoint import CheckpointStore
from tests.runs.driven import Driven, driven
from tests.runs.toys import PlainTrainer, expected_weight, repository, wait_for


def fill(path: Path) -> Path:
    """Put a full device in the place of a file; returns where the file went."""
    kept = path.with_name(f"kept-{path.name}")
    os.rename(path, kept)
    path.symlink_to("/dev/full")
    return kept


def reopen(made: Driven) -> None:
    """The writer finds the full device at its next open."""
    made.loop.journal._writer.close()


def test_a_full_log_pauses_and_every_line_is_there_after_resume(tmp_path: Path):
    with driven(tmp_path / "exp", PlainTrainer()) as made:
        made.run.pause().wait()
        kept = fill(made.folder.events)
        reopen(made)
        resume = made.run.resume()
        wait_for(lambda: made.run.status["reason"].startswith("disk full"))
        assert made.run.state == "paused"
        step = made.trainer.global_step
        assert made.run.set(lr=0.01).state == "pending"
        wait_for(lambda: made.run.settings["lr"] == 0.01)  # applied, though the answer cannot be written yet
        made.folder.events.unlink()
        os.rename(kept, made.folder.events)
        resume.wait()
        made.run.resume().wait()
        wait_for(lambda: made.trainer.global_step > step + 2)
        made.run.stop()
        assert made.run.metrics.index.tolist() == list(range(1, made.trainer.global_step + 1))
        ids = [event["id"] for event in made.events("request")]
        assert len(ids) == len(set(ids)) == 5
        assert [event["reason"].split(";")[0] for event in made.events("state") if "full" in event["reason"]]


def test_a_checkpoint_that_does_not_fit_is_owed_and_the_older_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from rlkit.runs import checkpoint as module

    room = {"left": False}
    real = module._write_json

    def write(path: Path, value: object) -> int:
        if not room["left"]:
            path.symlink_to("/dev/full")
        return real(path, value)

    with driven(tmp_path / "exp", PlainTrainer(), save_interval=4) as made:
        monkeypatch.setattr(module, "_write_json", write)
        wait_for(lambda: made.run.state == "paused")
        assert "disk full" in made.run.status["reason"]
        assert made.trainer.global_step == 4
        assert CheckpointStore(made.folder.checkpoints).newest().step == 0
        for ask in (made.run.resume, made.run.checkpoint, lambda: made.run.stop(wait=False)):
            with pytest.raises(RequestRefused, match="disk full"):
                ask().wait()
        assert made.run.state == "paused"
        room["left"] = True
        made.run.resume().wait()
        wait_for(lambda: made.trainer.global_step > 5)
        assert 4 in [event["step"] for event in made.events("checkpoint")]
        made.run.stop()
        assert made.trainer.weight == expected_weight(made.trainer.global_step)


def test_a_run_whose_last_checkpoint_does_not_fit_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rlkit.runs import checkpoint as module

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with driven(tmp_path / "exp", PlainTrainer(), 3, save_interval=0) as made:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_write_json", full)
            wait_for(lambda: made.run.state == "paused")
            assert made.trainer.global_step == 3
        made.run.resume().wait()
        made.join()
        assert made.run.state == "finished"
        assert CheckpointStore(made.folder.checkpoints).newest().step == 3


def test_a_signal_cannot_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rlkit.runs import checkpoint as module

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with driven(tmp_path / "exp", PlainTrainer()) as made:
        monkeypatch.setattr(module, "_write_json", full)
        made.loop.end("stopped", "SIGTERM")
        made.join()
        assert "SIGTERM, but no checkpoint could be written: disk full" in str(made.error)
        assert made.run.state == "failed"


def test_a_background_save_that_does_not_fit_pauses_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rlkit.runs import checkpoint as module

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with driven(tmp_path / "exp", PlainTrainer(), save_interval=2, async_save=True) as made:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_write_json", full)
            wait_for(lambda: made.run.state == "paused")
        made.run.resume().wait()
        made.run.stop()
        assert CheckpointStore(made.folder.checkpoints).newest().step == made.trainer.global_step


FILLED = """
import os, sys
sys.path.insert(0, {repository!r})
from pathlib import Path
from tests.runs.driven import driven
from tests.runs.toys import PlainTrainer, expected_weight, wait_for

disk = Path({disk!r})
with driven(disk / "exp", PlainTrainer(), save_interval=3) as made:
    made.run.pause().wait()
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError:
            pass
    try:
        made.run.resume()
    except Exception as error:  # control.jsonl may have no room either
        print("resume:", error)
        made.loop.heartbeat.update(state="running")
    wait_for(lambda: made.run.status["reason"].startswith("disk full"))
    step = made.trainer.global_step
    assert made.run.state == "paused", made.run.status
    ballast.unlink()
    made.run.resume().wait()
    wait_for(lambda: made.trainer.global_step > step + 4)
    made.run.stop()
    assert made.run.metrics.index.tolist() == list(range(1, made.trainer.global_step + 1))
    assert made.trainer.weight == expected_weight(made.trainer.global_step)
    print("steps before and after:", step, made.trainer.global_step)
"""


def test_a_small_file_system_fills_up_for_real(tmp_path: Path):
    """A tmpfs of 400 kB in a mount namespace of its own; skipped where the machine does not allow one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=400k tmpfs {disk}"
    flags = "-m" if os.geteuid() == 0 else "-rm"
    if shutil.which("unshare") is None or subprocess.run(["unshare", flags, "sh", "-c", mount]).returncode:
        pytest.skip("no mount namespaces here")
    script = tmp_path / "filled.py"
    script.write_text(FILLED.format(repository=str(repository()), disk=str(disk)))
    command = f"{mount} && exec {sys.executable} {script}"
    result = subprocess.run(["unshare", flags, "sh", "-c", command], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "steps before and after" in result.stdout
