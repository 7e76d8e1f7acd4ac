"""Drives a toy trainer on a thread of the test's process, to look into the loop while it runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlkit.runs.checkpoint import CheckpointPolicy
from rlkit.runs.handle import Run
from rlkit.runs.launch import write_run
from rlkit.runs.layout import DriverLock, RunFolder
from rlkit.runs.loop import RunLoop
from tests.runs.toys import PlainTrainer, wait_for


class Driven:
    """A run whose loop lives on a thread."""

    def __init__(self, folder: RunFolder, trainer: PlainTrainer, loop: RunLoop) -> None:
        self.folder, self.trainer, self.loop = folder, trainer, loop
        self.run = Run(folder.root)
        self.error: BaseException | None = None
        self._lock = DriverLock(folder)
        self._lock.acquire()
        self._thread = threading.Thread(target=self._drive, daemon=True)
        self._thread.start()
        wait_for(lambda: self.run.reader.status().get("came_up") or self.error)

    def _drive(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error
        finally:
            self._lock.release()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All events of one type so far."""
        return [event for event in Run(self.folder.root).reader.poll() if event["type"] == kind]


@contextmanager
def driven(root: Path, trainer: PlainTrainer, steps: int | None = None, **policy: Any) -> Iterator[Driven]:
    """A run in `root`; it is stopped at the end when it still goes on."""
    folder = write_run(trainer, root, steps, checkpoint_config=policy or None)
    made = CheckpointPolicy.of(policy or trainer.checkpoint_config)
    driving = Driven(folder, trainer, RunLoop(trainer, folder, total_steps=steps, policy=made))
    try:
        yield driving
    finally:
        driving.loop.end("stopped", "the test is over")
        driving.join()
