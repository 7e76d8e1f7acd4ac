"""Checkpoints: complete or invisible, whatever happens while they are written."""

import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkit.errors import CheckpointError, ConfigError
from rlkit.runs import checkpoint as module
from rlkit.runs.checkpoint import BackgroundSaver, Checkpoint, CheckpointPolicy, CheckpointStore


def state_of(value: float) -> dict[str, Any]:
    return {"actor": {"w": torch.full((100,), value)}, "critic": {"w": torch.full((50,), value)}, "step": value}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def value_in(store: CheckpointStore) -> float:
    state = store.load(store.newest())
    assert set(state["actor"]["w"].tolist()) == set(state["critic"]["w"].tolist()) == {state["step"]}
    return float(state["step"])


def test_a_checkpoint_is_a_folder_of_parts(store: CheckpointStore):
    saved = store.save(state_of(3.0), 3)
    assert saved == Checkpoint(store.root / "step_000003", 3, 1)
    names = {"actor.safetensors", "critic.safetensors", "state.json", "manifest.json"}
    assert {path.name for path in saved.path.iterdir()} == names
    assert os.listdir(store.root) == ["step_000003"]
    assert value_in(store) == 3.0


def test_no_checkpoint_is_an_error_that_says_what_was_skipped(store: CheckpointStore):
    with pytest.raises(CheckpointError, match="the folder holds none"):
        store.newest()
    (store.root / "step_000004").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"step_000004 has no readable manifest"):
        store.newest()


def die_after(writes: int, root: Path) -> None:
    """In a process of its own: save step 1, then die by SIGKILL before file number `writes` of the save of step 2."""
    store = CheckpointStore(root)
    store.save(state_of(1.0), 1, keep_last_k=1)
    done = 0

    def counted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal done
            if done == writes:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return function(*args)

        return call

    module.write_tensors = counted(module.write_tensors)
    module._write_json = counted(module._write_json)
    os.rename = counted(os.rename)
    store.save(state_of(2.0), 2, keep_last_k=1)


@pytest.mark.parametrize("writes", range(5))
def test_a_kill_after_any_file_leaves_the_previous_checkpoint(tmp_path: Path, writes: int):
    """Files of a save: two of tensors, state.json, manifest.json; then the rename."""
    process = multiprocessing.get_context("fork").Process(target=die_after, args=(writes, tmp_path))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    store = CheckpointStore(tmp_path)
    assert value_in(store) == 1.0
    store.save(state_of(3.0), 3, keep_last_k=1)
    assert os.listdir(tmp_path) == ["step_000003"]
    assert value_in(store) == 3.0


def test_a_failed_save_leaves_nothing_behind(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch):
    store.save(state_of(1.0), 1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_json", full)
    with pytest.raises(OSError, match="No space"):
        store.save(state_of(2.0), 2, keep_last_k=1)
    assert os.listdir(store.root) == ["step_000001"]
    assert value_in(store) == 1.0


@pytest.mark.parametrize("name", ["actor.safetensors", "state.json"])
def test_a_truncated_or_missing_file_is_noticed_and_the_previous_checkpoint_taken(store: CheckpointStore, name: str):
    store.save(state_of(1.0), 1)
    damaged = store.save(state_of(2.0), 2)
    os.truncate(damaged.path / name, 10)
    assert value_in(store) == 1.0
    assert f"step_000002/{name} has 10 bytes instead of" in store.skipped[0]
    with pytest.raises(CheckpointError, match="instead of"):
        store.load(damaged)
    (damaged.path / name).unlink()
    assert value_in(store) == 1.0
    assert store.skipped == [f"step_000002 lacks {name}"]


def test_the_last_one_saved_is_newest_whatever_its_number(store: CheckpointStore):
    store.save(state_of(1000.0), 1000)
    store.save(state_of(10.0), 10, keep_last_k=1)
    assert os.listdir(store.root) == ["step_000010"]
    assert value_in(store) == 10.0


def test_unfinished_leftovers_with_bigger_numbers_mislead_nobody(store: CheckpointStore):
    (store.root / "step_001000").mkdir(parents=True)
    (store.root / "step_001000" / "actor.safetensors").touch()
    (store.root / "step-2000").mkdir()
    store.save(state_of(10.0), 10, keep_last_k=1)
    assert value_in(store) == 10.0
    assert {"step_000010", "step_001000", "step-2000"} == set(os.listdir(store.root))


def test_rotation_keeps_the_last_ones_and_never_none(store: CheckpointStore):
    for step in (1, 2, 3, 4):
        store.save(state_of(float(step)), step, keep_last_k=2)
    assert sorted(os.listdir(store.root)) == ["step_000003", "step_000004"]
    store.rotate(0)
    assert os.listdir(store.root) == ["step_000004"]


def test_rotation_counts_complete_checkpoints_only(store: CheckpointStore):
    store.save(state_of(1.0), 1)
    os.truncate(store.save(state_of(2.0), 2).path / "state.json", 1)
    store.save(state_of(3.0), 3, keep_last_k=2)
    assert [item.step for item in store.complete()] == [1, 3]


def test_the_same_step_saved_again_replaces_the_older_one(store: CheckpointStore):
    store.save(state_of(1.0), 7)
    store.save(state_of(2.0), 7)
    assert os.listdir(store.root) == ["step_000007"]
    assert value_in(store) == 2.0


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(store: CheckpointStore):
    saved = store.save(state_of(1.0), 7)
    os.rename(saved.path, store.root / ".old-step_000007")
    shutil.copytree(store.root / ".old-step_000007", store.root / ".writing-step_000007-99")
    assert value_in(store) == 1.0
    store.clean()
    assert os.listdir(store.root) == ["step_000007"]
    assert value_in(store) == 1.0


def test_a_background_save_holds_the_state_at_the_time_of_the_call(store: CheckpointStore, monkeypatch: Any):
    gate = threading.Event()
    real = module.write_tensors

    def slow(*args: Any) -> int:
        assert gate.wait(30)
        return real(*args)

    monkeypatch.setattr(module, "write_tensors", slow)
    saver = BackgroundSaver(store)
    parameter = torch.ones(1000)
    saver.save({"actor": {"w": parameter}, "step": 5}, 5, tag="first")
    parameter.fill_(2.0)
    assert saver.busy
    assert saver.finished() == []
    assert store.complete() == []  # nothing is visible before it is complete
    gate.set()
    saver.wait()
    ((saved, tag),) = saver.finished()
    assert isinstance(saved, Checkpoint)
    assert (saved.step, tag) == (5, "first")
    assert store.load(saved)["actor"]["w"].tolist() == [1.0] * 1000


def test_a_second_background_save_waits_for_the_first_and_both_are_right(store: CheckpointStore):
    saver = BackgroundSaver(store)
    for step in (1, 2):
        saver.save(state_of(float(step)), step, tag=step)
    saver.wait()
    outcomes = saver.finished()
    assert [tag for _, tag in outcomes] == [1, 2]
    for saved, tag in outcomes:
        assert isinstance(saved, Checkpoint)
        assert store.load(saved)["step"] == tag


def test_an_error_of_a_background_save_surfaces(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_tensors", full)
    saver = BackgroundSaver(store)
    saver.save(state_of(1.0), 1)
    saver.wait()
    ((outcome, _),) = saver.finished()
    assert isinstance(outcome, OSError)
    assert store.complete() == []


def test_a_policy_is_checked():
    assert CheckpointPolicy.of({"save_interval": 100, "keep_last_k": 3, "async_save": True}).async_save
    assert CheckpointPolicy.of(None) == CheckpointPolicy()
    for config, message in (
        ({"save_intervall": 1}, "no 'save_intervall'; known: save_interval, keep_last_k, async_save"),
        ({"save_interval": -1}, "from 0 up, got -1"),
        ({"keep_last_k": 0}, "from 1 up, got 0"),
        ({"keep_last_k": True}, "from 1 up, got True"),
        ({"async_save": "yes"}, "True or False, got 'yes'"),
    ):
        with pytest.raises(ConfigError, match=message):
            CheckpointPolicy.of(config)
