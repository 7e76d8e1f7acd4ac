"""The process that trains: `python -m rlkit.runs.driver RUNDIR`.

It has a session of its own, so neither an interrupt nor the death of the notebook's kernel reaches it. Its exit code
is 0 when the run ended as it should and 1 when it failed; the reason is in status.json and the trace in log.txt.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

from rlkit.errors import RunError
from rlkit.runs import events
from rlkit.runs.checkpoint import CheckpointPolicy, CheckpointStore
from rlkit.runs.heartbeat import Heartbeat
from rlkit.runs.journal import is_disk_full
from rlkit.runs.layout import DriverLock, RunFolder, read_json, read_status
from rlkit.runs.log import LineWriter
from rlkit.runs.loop import RunLoop
from rlkit.runs.recipe import load_recipe, read_header
from rlkit.runs.state_files import read_frozen

__all__ = ["RunLoop", "load_trainer", "main"]

LOCK_WAIT_S = 5.0


def main(directory: str) -> int:
    """Drive the run in `directory` to its end; returns the exit code."""
    faulthandler.enable()
    sys.stdout, sys.stderr = _LogStream(sys.stdout), _LogStream(sys.stderr)
    folder = RunFolder.open(directory)
    lock = DriverLock(folder)
    lock.acquire(LOCK_WAIT_S)
    heartbeat = Heartbeat(folder, {**read_status(folder), "state": "starting", "reason": ""})
    heartbeat.start()
    try:
        loop = _prepare(folder, heartbeat)
    except BaseException as error:
        traceback.print_exc()
        _record_failed_start(folder, heartbeat, error)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: loop.end("stopped", signal.Signals(received).name))
    try:
        loop.run()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        lock.release()
    return 0


def load_trainer(folder: RunFolder, *, extend_path: bool = False) -> Any:
    """The trainer of a run with the newest checkpoint's state: recipe, frozen weights, then everything else.

    Args:
        extend_path: add the folders that the run imports from to `sys.path` where they are missing.

    Raises:
        RunError: the recipe cannot be read here.
        CheckpointError: no complete checkpoint, or a state that does not fit.
    """
    if extend_path:
        header = read_header(folder.recipe)
        wanted = [entry or header["cwd"] for entry in header["sys_path"]]
        sys.path.extend(entry for entry in wanted if entry not in sys.path)
    recipe = load_recipe(folder.recipe)
    recipe.trainer.load_frozen_state_dict(read_frozen(folder.frozen))
    store = CheckpointStore(folder.checkpoints)
    recipe.trainer.load_state_dict(store.load(store.newest()))
    recipe.check_filled()
    return recipe.trainer


def _prepare(folder: RunFolder, heartbeat: Heartbeat) -> RunLoop:
    header = read_header(folder.recipe)
    os.chdir(header["cwd"])
    sys.path[:] = header["sys_path"]
    importlib.invalidate_caches()
    options = read_json(folder.config).get("run", {})
    return RunLoop(
        load_trainer(folder),
        folder,
        total_steps=options.get("total_steps"),
        policy=CheckpointPolicy.of(options.get("checkpoint_config")),
        track_metrics=options.get("track_metrics", ()),
        heartbeat=heartbeat,
    )


def _record_failed_start(folder: RunFolder, heartbeat: Heartbeat, error: BaseException) -> None:
    message = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        writer = LineWriter(folder.events)
        trace = "".join(traceback.format_exception(error))
        writer.write(events.error(0, message, trace), events.state("failed", 0, message))
        writer.close()
    heartbeat.update(state="failed", reason=message)
    heartbeat.close()


class _LogStream:
    """Output to log.txt, line by line. A full disk must not stop the training that prints."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            if not is_disk_full(error):
                raise
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            if not is_disk_full(error):
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _run(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m rlkit.runs.driver RUNDIR", file=sys.stderr)
        return 2
    try:
        return main(arguments[0])
    except RunError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
