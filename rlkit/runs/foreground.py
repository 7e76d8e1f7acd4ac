"""Training in the cell: the same folder, loop and requests as a background run, driven by this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rlkit.runs.checkpoint import CheckpointPolicy
from rlkit.runs.journal import Journal
from rlkit.runs.layout import DriverLock, RunFolder, read_json
from rlkit.runs.loop import RunLoop
from rlkit.runs.progress import ProgressLine
from rlkit.runs.protocol import Trainable

if TYPE_CHECKING:
    from rlkit.runs.handle import Run

_SESSION = "_foreground_session"


class ForegroundSession:
    """The run folder that a trainer trains into from a cell, over several calls. Stays out of recipes."""

    def __init__(self, folder: RunFolder, options: Mapping[str, Any]) -> None:
        self.folder = folder
        self.options = options
        self.journal: Journal | None = None
        """Holds what a full disk kept back when a call ended."""

    def __reduce__(self) -> Any:
        return type(None), ()


def train_here(
    trainer: Trainable,
    steps: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    *,
    progress: bool = True,
    track_metrics: Sequence[str] = (),
    checkpoint_config: CheckpointPolicy | Mapping[str, Any] | None = None,
) -> Run:
    """Take steps in this process, recorded in a run folder like a background run.

    An interrupt lets the step finish, saves, and returns; a second one cuts the step off and goes back to the newest
    checkpoint. Either way the run is paused and the next call goes on with it.

    Args:
        trainer: what to train.
        steps: steps to take; None goes on until stopped or interrupted.
        directory: run folder; None goes on with that of the last call, or makes runs/<algorithm>-<time>.
        progress: draw a progress line on stderr.
        track_metrics: further sinks; counts when the folder is made.
        checkpoint_config: when to save; counts when the folder is made.

    Raises:
        RunError: the folder belongs to another run.
        Exception: whatever the trainer raises; the run is "failed" then, and can be gone on with all the same.
    """
    from rlkit.runs.handle import Run

    first = trainer.global_step
    total = None if steps is None else first + steps
    session = _session(trainer, directory, total, track_metrics, checkpoint_config)
    line = ProgressLine(first, total) if progress else None
    with DriverLock(session.folder):
        loop = RunLoop(
            trainer,
            session.folder,
            total_steps=total,
            policy=CheckpointPolicy.of(session.options["checkpoint_config"]),
            track_metrics=session.options["track_metrics"],
            journal=session.journal,
            on_step=line,
        )
        session.journal = loop.journal
        try:
            with _interrupt_ends(loop):
                loop.run()
        finally:
            if loop.journal.clear:
                session.journal = None
            if line is not None:
                line.close()
    return Run(session.folder.root)


def _session(
    trainer: Trainable,
    directory: str | os.PathLike[str] | None,
    total_steps: int | None,
    track_metrics: Sequence[str],
    checkpoint_config: CheckpointPolicy | Mapping[str, Any] | None,
) -> ForegroundSession:
    """The session to go on with, or a new one in a new folder."""
    known = getattr(trainer, _SESSION, None)
    if isinstance(known, ForegroundSession) and known.folder.config.exists():
        same = directory is None or Path(directory).expanduser().absolute() == known.folder.root
        ours = read_json(known.folder.config).get("run", {}).get("id") == known.options["id"]
        if same and ours:
            return known
    from rlkit.runs.launch import write_run

    if directory is None:
        name = str(trainer.describe().get("algorithm", "run"))
        directory = _unused(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = write_run(trainer, directory, total_steps, track_metrics, checkpoint_config, recipe_needed=False)
    session = ForegroundSession(folder, read_json(folder.config)["run"])
    setattr(trainer, _SESSION, session)
    return session


def _unused(path: Path) -> Path:
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


@contextmanager
def _interrupt_ends(loop: RunLoop) -> Iterator[None]:
    """The first SIGINT ends the loop after the step; the second raises KeyboardInterrupt where it stands."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        loop.end("paused", "interrupted in the cell; train() goes on")

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
