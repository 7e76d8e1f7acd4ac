"""A run as a notebook or script sees it: a folder to read and a place to send requests to. Never holds a trainer."""

from __future__ import annotations

import html
import math
import os
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlkit.errors import RunError
from rlkit.runs.control import send
from rlkit.runs.layout import is_run, lock_is_held
from rlkit.runs.liveness import describe_exit, log_tail
from rlkit.runs.protocol import Trainable
from rlkit.runs.reader import RunReader
from rlkit.runs.request import Request

if TYPE_CHECKING:
    import pandas as pd

    from rlkit.runs.launch import DriverProcess

POLL_S = 0.05
ENDING_S = 10.0
REAPED_S = 2.0

__all__ = ["Request", "Run", "attach", "list_runs"]


class Run:
    """A background run. Made by `trainer.start(dir)` and `rlkit.attach(dir)`; dropping it does not touch the run."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        trainer: Trainable | None = None,
        process: DriverProcess | None = None,
    ) -> None:
        """Raises RunError when the folder is not a run."""
        self.reader = RunReader(directory)
        self._trainer = weakref.ref(trainer) if trainer is not None else None
        self._process = process

    # What it is and how it stands

    @property
    def dir(self) -> Path:
        """The run folder."""
        return self.reader.folder.root

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.reader.folder.name

    @property
    def status(self) -> dict[str, Any]:
        """State, step, settings and reason as they are now, with "alive" and "heartbeat_age_s"."""
        status = self.reader.live_status()
        if status.get("died") and self._process is not None:
            code = self._process.exit_code(within_s=REAPED_S)
            if code is not None:
                status["reason"] = describe_exit(code)
        return status

    @property
    def state(self) -> str:
        """ "starting", "running", "paused", "stopping", "stopped", "finished" or "failed"."""
        return str(self.status["state"])

    @property
    def alive(self) -> bool:
        """Whether a driver is there and answers requests."""
        return bool(self.status["alive"])

    @property
    def step_count(self) -> int:
        """Steps completed."""
        return int(self.status.get("step", 0))

    @property
    def settings(self) -> dict[str, Any]:
        """Live settings in force."""
        return dict(self.status.get("settings", {}))

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for."""
        return self.reader.config()

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per step, one column per metric."""
        return self.reader.metrics()

    @property
    def rollouts(self) -> pd.DataFrame:
        """Every recorded rollout; `run.reader.rollouts(step)` gives those of one step."""
        return self.reader.rollouts()

    def events(self, *types: str) -> list[dict[str, Any]]:
        """The run's journal in order; with `types` ("request", "state", "checkpoint", ...) those events alone."""
        events = RunReader(self.dir).poll()
        return [event for event in events if not types or event["type"] in types]

    def tail(self, n: int = 20) -> str:
        """The last `n` lines of the driver's output."""
        return log_tail(self.reader.folder, n)

    def figure(self, *patterns: str, live: bool = False) -> Any:
        """Metrics as a plotly figure; see `rlkit.runs.figures.figure`."""
        from rlkit.runs.figures import figure

        return figure(RunReader(self.dir), *patterns, live=live)

    # Requests

    def _ask(self, kind: str, **args: Any) -> Request:
        status = self.status
        if not status["alive"]:
            raise RunError(
                f"the run in {self.dir} is {status['state']} at step {status.get('step', '?')} "
                f"({status.get('reason') or 'no reason given'}), so nobody answers {kind}. run.load() brings its "
                "trainer back."
            )
        return Request(self, send(self.dir, kind, args, "python"), kind, args)

    def pause(self) -> Request:
        """Stop between two steps and wait."""
        return self._ask("pause")

    def resume(self) -> Request:
        """Go on after a pause, also after one for want of disk space."""
        return self._ask("resume")

    def step(self, n: int = 1) -> Request:
        """Take `n` steps while paused, then pause again; answered when they are done."""
        return self._ask("step", n=n)

    def checkpoint(self) -> Request:
        """Save; answered when the checkpoint is complete on disk."""
        return self._ask("checkpoint")

    def set(self, **changes: Any) -> Request:
        """Change live settings at the next step boundary, all of them or none."""
        return self._ask("set", **changes)

    def stop(self, wait: bool = True) -> Request:
        """Save and end the run at the next step boundary; with `wait`, until its process has gone.

        Raises RequestRefused when it cannot be saved (a full disk); the run stays paused then.
        """
        request = self._ask("stop")
        if wait:
            request.wait(timeout=math.inf)
            while self.alive:
                time.sleep(POLL_S)
            self._wait_for_release()
        return request

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the run has ended; `timeout` in seconds.

        Raises RunError when it failed (with the end of its log), or has not ended in time.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.status)["alive"]:
            if time.monotonic() >= deadline:
                raise RunError(
                    f"the run is {status['state']} at step {status.get('step')} after {timeout:g} s; it goes on."
                )
            time.sleep(POLL_S)
        self._wait_for_release()
        if status["state"] == "failed":
            raise RunError(f"the run failed at step {status.get('step')}: {status.get('reason')}\n{self.tail()}")
        return self

    def _wait_for_release(self) -> None:
        """After the last status a driver still writes its log; then it gives up the folder."""
        deadline = time.monotonic() + ENDING_S
        while lock_is_held(self.reader.folder) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def wait_for_step(self, step: int, timeout: float = 600) -> Self:
        """Wait until the run has completed `step` steps or has ended; `timeout` in seconds.

        Raises RunError when it failed, or has not come so far in time.
        """
        deadline = time.monotonic() + timeout
        while (status := self.status)["alive"] and int(status.get("step", 0)) < step:
            if time.monotonic() >= deadline:
                raise RunError(
                    f"the run is {status['state']} at step {status.get('step')}, not at {step}, after {timeout:g} s"
                )
            time.sleep(POLL_S)
        if status["state"] == "failed":
            raise RunError(f"the run failed at step {status.get('step')}: {status.get('reason')}\n{self.tail()}")
        return self

    # The trainer

    def load(self, copy: bool = False) -> Any:
        """Bring the trainer back into this process with the run's newest checkpoint.

        Args:
            copy: make a trainer of its own even while the run goes on; the run keeps its state.

        Returns:
            The trainer that was started, when it is still in this process; else a new one out of the recipe.

        Raises:
            RunError: the run is alive; the recipe cannot be read here.
            CheckpointError: no complete checkpoint, or one that does not fit.
        """
        from rlkit.runs.checkpoint import CheckpointStore
        from rlkit.runs.driver import load_trainer
        from rlkit.runs.state_files import read_frozen

        folder = self.reader.folder
        if self.alive and not copy:
            raise RunError(
                f"the run in {self.dir} is {self.state} and owns its state. stop() it first, or use load(copy=True) "
                "for a copy of its newest checkpoint."
            )
        trainer = self._trainer() if self._trainer is not None and not copy else None
        if trainer is None:
            problem = self.config.get("run", {}).get("recipe_problem")
            if problem:
                raise RunError(f"this run has no recipe: {problem}")
            return load_trainer(folder, extend_path=True)
        store = CheckpointStore(folder.checkpoints)
        trainer.reclaim(store.load(store.newest()), read_frozen(folder.frozen))
        return trainer

    # Display

    def _summary(self) -> str:
        status = self.status
        total = status.get("total_steps")
        steps = f"step {status.get('step', '?')}" + (f" of {total}" if total else "")
        reason = f", {status['reason']}" if status.get("reason") else ""
        return f"{status['state']} at {steps}{reason}"

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self._summary()}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        name, summary, place = (html.escape(text) for text in (self.name, self._summary(), str(self.dir)))
        return {"text/plain": repr(self), "text/html": f"<div><b>{name}</b>: {summary}<br><code>{place}</code></div>"}


def attach(directory: str | os.PathLike[str]) -> Run:
    """A handle on a run that was started elsewhere. Raises RunError when the folder is not a run."""
    return Run(directory)


def list_runs(root: str | os.PathLike[str] = "runs", depth: int = 3) -> list[Run]:
    """The runs in a folder and its subfolders down to `depth`, newest first. Raises RunError when it does not exist."""
    top = Path(root).expanduser()
    if not top.is_dir():
        raise RunError(f"there is no folder {top.absolute()} to look for runs in.")
    found = [Run(folder) for folder in _run_folders(top, depth)]
    return sorted(found, key=lambda run: float(run.reader.status().get("started") or 0.0), reverse=True)


def _run_folders(folder: Path, depth: int) -> list[Path]:
    if is_run(folder):
        return [folder]
    if depth == 0:
        return []
    children = sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    return [run for child in children for run in _run_folders(child, depth - 1)]
