"""Run folders: what is one, what is not, and who may drive it."""

import json
import threading
import time
from pathlib import Path

import pytest

from rlkit.errors import RunError
from rlkit.runs.layout import (
    DriverLock,
    RunFolder,
    is_run,
    lock_is_held,
    read_status,
    write_atomic,
    write_status,
)


def make_run(root: Path, **status: object) -> RunFolder:
    root.mkdir(parents=True)
    folder = RunFolder(root)
    folder.config.write_text("{}")
    write_status(folder, {"state": "stopped", "step": 4, "came_up": True, **status})
    return folder


def test_a_run_folder_opens(tmp_path: Path):
    make_run(tmp_path / "exp")
    folder = RunFolder.open(tmp_path / "exp")
    assert folder.name == "exp"
    assert folder.rollouts_of(120) == tmp_path / "exp" / "rollouts" / "step_000120.parquet"
    assert folder.relative(folder.rollouts_of(3)) == "rollouts/step_000003.parquet"
    assert is_run(tmp_path / "exp")
    assert not is_run(tmp_path)


def test_what_is_no_run_is_named(tmp_path: Path):
    with pytest.raises(RunError, match=r"there is no run folder at .*gone"):
        RunFolder.open(tmp_path / "gone")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match=r"not a run folder.*found config\.json, notes\.txt"):
        RunFolder.open(tmp_path)
    with pytest.raises(RunError, match="is a file"):
        RunFolder.open(tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="it is empty"):
        RunFolder.open(tmp_path / "empty")


def test_a_new_run_takes_a_missing_or_an_empty_folder(tmp_path: Path):
    assert RunFolder.create(tmp_path / "a" / "b").root.is_dir()
    assert RunFolder.create(tmp_path / "a" / "b").root.is_dir()


def test_a_new_run_does_not_take_the_folder_of_another(tmp_path: Path):
    make_run(tmp_path / "exp")
    with pytest.raises(RunError, match=r"already holds a run \(stopped at step 4\).*another folder.*rlkit\.attach"):
        RunFolder.create(tmp_path / "exp")


def test_a_new_run_does_not_take_a_folder_with_other_things(tmp_path: Path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(RunError, match=r"not empty and not a run; found model\.safetensors"):
        RunFolder.create(tmp_path)
    with pytest.raises(RunError, match="is a file"):
        RunFolder.create(tmp_path / "model.safetensors")


def test_a_run_that_never_came_up_gives_its_folder_free(tmp_path: Path):
    folder = make_run(tmp_path / "exp", state="failed", came_up=False)
    (folder.root / "mine.txt").touch()
    assert RunFolder.create(tmp_path / "exp") == folder
    folder.clear()
    assert [path.name for path in folder.root.iterdir()] == ["mine.txt"]


def test_a_run_that_is_coming_up_does_not(tmp_path: Path):
    make_run(tmp_path / "exp", state="starting", came_up=False, heartbeat=time.time())
    with pytest.raises(RunError, match="already holds a run"):
        RunFolder.create(tmp_path / "exp")


def test_one_trainer_drives_a_folder(tmp_path: Path):
    folder = make_run(tmp_path / "exp", pid=4711)
    assert not lock_is_held(folder)
    with DriverLock(folder):
        assert lock_is_held(folder)
        with pytest.raises(RunError, match=r"already driven by another trainer \(process 4711"):
            DriverLock(folder).acquire()
    assert not lock_is_held(folder)
    with DriverLock(folder):
        assert lock_is_held(folder)


def test_a_driver_waits_out_a_glance_at_its_lock(tmp_path: Path):
    folder = make_run(tmp_path / "exp")
    lock = DriverLock(folder)
    lock.acquire()
    threading.Timer(0.1, lock.release).start()
    DriverLock(folder).acquire(timeout_s=10)


def test_readers_never_see_half_a_file(tmp_path: Path):
    path = tmp_path / "status.json"
    write_atomic(path, b"{}")
    done = threading.Event()

    def write() -> None:
        for number in range(300):
            write_atomic(path, json.dumps({"n": number, "pad": "x" * 5000}).encode())
        done.set()

    threading.Thread(target=write).start()
    while not done.is_set():
        json.loads(path.read_bytes())
    assert [item.name for item in tmp_path.iterdir()] == ["status.json"]


def test_the_status_is_written_in_place_when_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make_run(tmp_path / "exp")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlkit.runs.layout.write_atomic", full)
    write_status(folder, {"state": "paused", "reason": "disk full"})
    assert read_status(folder) == {"state": "paused", "reason": "disk full"}


def test_a_status_that_cannot_be_read_is_an_error(tmp_path: Path):
    folder = make_run(tmp_path / "exp")
    folder.status.write_text("{")
    with pytest.raises(RunError, match="cannot be read as a status"):
        read_status(folder)
