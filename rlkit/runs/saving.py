"""When a run saves, and what it still owes."""

from __future__ import annotations

from typing import Any

from rlkit.runs import events
from rlkit.runs.checkpoint import BackgroundSaver, Checkpoint, CheckpointPolicy, CheckpointStore
from rlkit.runs.journal import Journal
from rlkit.runs.layout import RunFolder
from rlkit.runs.protocol import Trainable


class Saving:
    """Saves a trainer by a policy and announces each checkpoint once it is complete."""

    def __init__(self, trainer: Trainable, folder: RunFolder, policy: CheckpointPolicy, journal: Journal) -> None:
        self.store = CheckpointStore(folder.checkpoints)
        self.policy = policy
        self.owed = False
        """A checkpoint could not be written for want of space."""
        self._trainer, self._folder, self._journal = trainer, folder, journal
        self._saver = BackgroundSaver(self.store)
        self._saved_step: int | None = None
        self._settings_changed = False

    def adopt_newest(self, announced: set[str]) -> None:
        """Take the newest checkpoint as the state at the start. Raises CheckpointError when there is none."""
        newest = self.store.newest()
        self._saved_step = newest.step
        if self._folder.relative(newest.path) not in announced:
            self._announce(newest)

    def settings_changed(self) -> None:
        """The state differs from the last checkpoint though no step was taken."""
        self._settings_changed = True

    @property
    def needed(self) -> bool:
        """Whether the state as it is now is on no disk."""
        return self.owed or self._settings_changed or self._saved_step != self._trainer.global_step

    @property
    def due(self) -> bool:
        """Whether the policy wants a checkpoint at this step."""
        interval = self.policy.save_interval
        return bool(interval) and self._trainer.global_step % interval == 0

    def save(self) -> None:
        """Save now and wait for the disk. Raises OSError when it is full; the checkpoint is owed then."""
        self._saver.wait()
        try:
            saved = self.store.save(self._trainer.state_dict(), self._trainer.global_step, self.policy.keep_last_k)
        except OSError:
            self.owed = True
            raise
        self.owed = self._settings_changed = False
        self._announce(saved)

    def save_later(self, tag: Any = None) -> None:
        """Save in the background; `tag` comes back from `collect`."""
        self._saver.save(self._trainer.state_dict(), self._trainer.global_step, self.policy.keep_last_k, tag)
        self._settings_changed = False

    def collect(self) -> list[tuple[BaseException | None, Any]]:
        """(error or None, tag) of the background saves that ended since the last call."""
        ended: list[tuple[BaseException | None, Any]] = []
        for outcome, tag in self._saver.finished():
            if isinstance(outcome, Checkpoint):
                self._announce(outcome)
                ended.append((None, tag))
            else:
                self.owed = True
                ended.append((outcome, tag))
        return ended

    def wait(self) -> None:
        """Wait for the save that is being written."""
        self._saver.wait()

    def restore_newest(self) -> int:
        """Load the newest checkpoint into the trainer; returns its step."""
        self.wait()
        newest = self.store.newest()
        self._trainer.load_state_dict(self.store.load(newest))
        return newest.step

    def _announce(self, saved: Checkpoint) -> None:
        self._saved_step = saved.step
        self._journal.put(events.checkpoint(saved.step, self._folder.relative(saved.path)))
