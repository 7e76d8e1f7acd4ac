"""Turns a trainer into a run: its folder (recipe and first checkpoint), then the process that drives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlkit
from rlkit.env import for_child
from rlkit.errors import CheckpointError, RunError
from rlkit.runs.checkpoint import CheckpointPolicy, CheckpointStore
from rlkit.runs.events import plain
from rlkit.runs.heartbeat import initial_status
from rlkit.runs.journal import is_disk_full
from rlkit.runs.layout import DriverLock, RunFolder, read_status, write_atomic, write_status
from rlkit.runs.liveness import describe_exit, log_tail
from rlkit.runs.protocol import Trainable
from rlkit.runs.recipe import dump_recipe
from rlkit.runs.sinks import check_sinks
from rlkit.runs.state_files import write_frozen

if TYPE_CHECKING:
    from rlkit.runs.handle import Run

POLL_S = 0.05


def launch(
    trainer: Trainable,
    directory: str | os.PathLike[str],
    steps: int | None = None,
    track_metrics: Sequence[str] = (),
    *,
    checkpoint_config: CheckpointPolicy | Mapping[str, Any] | None = None,
    release_first: bool = False,
) -> Run:
    """Start a background run from a trainer as it stands and wait until its driver is up.

    Args:
        trainer: what to train. It is left as it is; the caller releases it.
        directory: a new or empty folder.
        steps: steps to take from here; None goes on until stopped.
        track_metrics: further sinks, "tensorboard" and "csv".
        checkpoint_config: when to save; None takes the one of `trainer.describe()["config"]`.
        release_first: release the trainer's memory before the driver loads its own copy, and take it back if the
            driver does not come up. For a device that cannot hold both.

    Raises:
        RunError: the folder is taken, something in the trainer cannot travel, or the driver did not come up (with the
            end of its log).
        ConfigError: an unknown sink or checkpoint setting.
        OSError: the disk is full. The folder is left as it was found.
    """
    total = None if steps is None else trainer.global_step + steps
    folder = write_run(trainer, directory, total, track_metrics, checkpoint_config)
    if release_first:
        trainer.release(str(folder.root))
    try:
        process = DriverProcess(folder)
        _wait_until_up(folder, process)
    except BaseException:
        if release_first:
            _take_back(trainer, folder)
        raise
    from rlkit.runs.handle import Run

    return Run(folder.root, trainer=trainer, process=process)


def write_run(
    trainer: Trainable,
    directory: str | os.PathLike[str],
    total_steps: int | None,
    track_metrics: Sequence[str] = (),
    checkpoint_config: CheckpointPolicy | Mapping[str, Any] | None = None,
    *,
    recipe_needed: bool = True,
) -> RunFolder:
    """Write everything a driver needs into a new run folder; see `launch`.

    `recipe_needed=False` goes without a recipe when the trainer cannot be pickled, and says so in config.json.
    """
    description = trainer.describe()
    if checkpoint_config is None:
        checkpoint_config = description.get("config", {}).get("checkpoint_config")
    policy = CheckpointPolicy.of(checkpoint_config)
    sinks = check_sinks(track_metrics)
    state, frozen = trainer.state_dict(), trainer.frozen_state_dict()
    problem = ""
    recipe = b""
    try:
        recipe = dump_recipe(trainer, state, frozen)
    except RunError as error:
        if recipe_needed:
            raise
        problem = str(error)
    options = {
        "id": uuid.uuid4().hex[:12],
        "created": time.time(),
        "first_step": trainer.global_step,
        "total_steps": total_steps,
        "track_metrics": list(sinks),
        "checkpoint_config": {name: getattr(policy, name) for name in CheckpointPolicy.__dataclass_fields__},
        "rlkit": rlkit.__version__,
        "recipe_problem": problem,
    }
    config = {"setting_specs": trainer.setting_specs(), **description, "run": options}
    existed = Path(directory).expanduser().exists()
    folder = RunFolder.create(directory)
    with DriverLock(folder):
        RunFolder.create(directory)  # now that nobody else can write, is it still free?
        folder.clear()
        try:
            write_status(folder, initial_status(folder, total_steps, trainer.global_step))
            write_atomic(folder.dataflow, _json(trainer.dataflow_json()))
            if not problem:
                write_atomic(folder.recipe, recipe, sync=True)
            write_frozen(folder.frozen, frozen)
            CheckpointStore(folder.checkpoints).save(state, trainer.global_step)
            write_atomic(folder.config, _json(config), sync=True)
            folder.log.touch()
        except BaseException as error:
            _undo(folder, existed)
            if is_disk_full(error):
                raise OSError(error.errno, f"no room for the run in {folder.root}") from error  # type: ignore[attr-defined]
            raise
    return folder


def _json(value: Any) -> bytes:
    return json.dumps(plain(value), indent=1, ensure_ascii=False).encode()


def _undo(folder: RunFolder, existed: bool) -> None:
    folder.clear()
    if not existed:
        folder.lock.unlink(missing_ok=True)
        folder.root.rmdir()


class DriverProcess:
    """The driver as seen by the process that started it. A thread waits for its end, so that no zombie stays."""

    def __init__(self, folder: RunFolder) -> None:
        with open(folder.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlkit.runs.driver", str(folder.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=for_child(import_from=Path(rlkit.__file__).parents[1]),
            )
        self.pid = self._process.pid
        self._exit_code: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._reap, name=f"rlkit-driver-{self.pid}", daemon=True).start()

    def _reap(self) -> None:
        self._exit_code = self._process.wait()
        self._ended.set()

    def exit_code(self, within_s: float = 0.0) -> int | None:
        """Exit code, minus the number of the signal that killed it; None when it has not ended within that time."""
        self._ended.wait(within_s)
        return self._exit_code

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return not self._ended.is_set()

    def terminate(self) -> None:
        """Ask the process to end, and end it when it does not within seconds."""
        self._process.terminate()
        if not self._ended.wait(5):
            self._process.kill()
            self._ended.wait()


def _wait_until_up(folder: RunFolder, process: DriverProcess) -> None:
    """Raises RunError when the driver fails before its first step; an interrupt ends the driver."""
    try:
        while True:
            alive = process.alive
            status = read_status(folder)
            if status.get("came_up"):
                return
            if not alive:
                reason = status.get("reason") or describe_exit(process.exit_code())
                write_status(folder, {**status, "state": "failed", "reason": reason})
                raise RunError(f"the run in {folder.root} did not start: {reason}\n{log_tail(folder)}")
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        process.terminate()
        raise


def _take_back(trainer: Trainable, folder: RunFolder) -> None:
    from rlkit.runs.state_files import read_frozen

    store = CheckpointStore(folder.checkpoints)
    try:
        trainer.reclaim(store.load(store.newest()), read_frozen(folder.frozen))
    except CheckpointError as error:
        raise RunError(f"the state in {folder.root} could not be taken back: {error}") from error
