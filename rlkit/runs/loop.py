"""The loop that drives a trainer: in a process of its own, or in a notebook cell. Between steps it serves requests."""

from __future__ import annotations

import time
import traceback as tracebacks
from collections.abc import Callable, Sequence
from typing import Any

from rlkit.errors import RequestRefused, RunError
from rlkit.runs import events
from rlkit.runs.checkpoint import CheckpointPolicy
from rlkit.runs.control import ControlLine, ControlReader
from rlkit.runs.heartbeat import Heartbeat, initial_status
from rlkit.runs.journal import DiskFullError, Journal, describe_full, is_disk_full
from rlkit.runs.layout import RunFolder
from rlkit.runs.protocol import RunState, StepResult, Trainable
from rlkit.runs.saving import Saving
from rlkit.runs.serving import StepQuota, serve
from rlkit.runs.sinks import SINKS, check_sinks

POLL_S = 0.05
RETRY_S = 1.0


class RunLoop:
    """Drives one trainer until it has taken its steps, is told to stop, or fails.

    The caller holds the `DriverLock` of the folder. Every answer, metric and checkpoint event is written once, in
    order. A full disk pauses the run; nothing is lost, and "resume" tries again.
    """

    def __init__(
        self,
        trainer: Trainable,
        folder: RunFolder,
        *,
        total_steps: int | None,
        policy: CheckpointPolicy | None = None,
        track_metrics: Sequence[str] = (),
        heartbeat: Heartbeat | None = None,
        journal: Journal | None = None,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> None:
        """Prepare; nothing is written before `run`.

        Args:
            total_steps: the `global_step` at which the run has finished; None goes on until it is stopped.
            policy: when to save checkpoints.
            track_metrics: further sinks, see `sinks.SINKS`.
            heartbeat: one that runs already; else the loop starts its own.
            journal: one that still holds what could not be written; else the loop opens its own.
            on_step: called after each step, once its results are written.
        """
        self.trainer, self.folder, self.total_steps = trainer, folder, total_steps
        self.journal = journal or Journal(folder, [SINKS[name](folder) for name in check_sinks(track_metrics)])
        answered, self._announced = self.journal.history()
        self.control = ControlReader(folder, answered)
        self.saving = Saving(trainer, folder, policy or CheckpointPolicy(), self.journal)
        self.heartbeat = heartbeat or Heartbeat(folder, initial_status(folder, total_steps, trainer.global_step))
        self._heartbeat_runs = heartbeat is not None
        self.quota: StepQuota | None = None
        self.stop_line: ControlLine | None = None
        self._ending: tuple[RunState, str] | None = None
        self._ended = self._failing = False
        self._on_step = on_step
        self._retry_at = 0.0

    @property
    def state(self) -> RunState:
        """The state as the status says it."""
        return self.heartbeat.state

    @property
    def step(self) -> int:
        """Steps completed."""
        return self.trainer.global_step

    @property
    def complete(self) -> bool:
        """Whether all steps are taken."""
        return self.total_steps is not None and self.step >= self.total_steps

    @property
    def ending(self) -> str:
        """Why the loop ends at this boundary; "" when it goes on."""
        return self._ending[1] if self._ending is not None else ""

    def end(self, state: RunState, reason: str) -> None:
        """Ask the loop to save and end at the next boundary, in that state. Safe to call from a signal handler."""
        if self._ending is None:
            self._ending = (state, reason)

    def run(self) -> RunState:
        """Drive until the end; returns the state it ended in. An exception of the trainer is recorded and raised."""
        try:
            self._begin()
            while not self._ended:
                self._collect_saves()
                serve(self)
                self._advance()
        except KeyboardInterrupt:
            self._abandon()
        except BaseException as error:
            self._fail(error)
            raise
        return self.state

    def _begin(self) -> None:
        if not self._heartbeat_runs:
            self.heartbeat.start()
        settings = self.trainer.settings()
        self.journal.put(events.settings(self.step, settings))
        self.saving.adopt_newest(self._announced)
        self.heartbeat.update(step=self.step, total_steps=self.total_steps, settings=settings)
        self.move_to("running", came_up=True)

    def _advance(self) -> None:
        """What there is to do at a boundary: end, wait or take a step."""
        if self._ending is None and self.complete and self.state == "running":
            self._ending = ("finished", f"took all {self.total_steps} steps")
        if self._ending is not None:
            self._finish(*self._ending)
        elif self.state == "running":
            self._take_step()
        else:
            self._idle()

    def _take_step(self) -> None:
        result = self.trainer.step()
        self.journal.put_step(result)
        written = self.flush()
        self.heartbeat.update(step=self.step)  # whoever waits for a step finds what it wrote
        if written and self.saving.due:
            self._save()
        if self._on_step is not None:
            self._on_step(result)
        if self.quota is not None:
            self.quota.taken += 1
            if self.quota.taken >= self.quota.n:
                self.end_quota()
                if self.state == "running" and not self.complete:
                    self.move_to("paused", "took the steps that were asked for")

    def _idle(self) -> None:
        time.sleep(POLL_S)
        if not self.journal.clear and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + RETRY_S
            self.flush()

    # What requests use

    def move_to(self, state: RunState, reason: str = "", **status: Any) -> None:
        """Change the state and record it; `status`: what else changes in status.json with it."""
        self.heartbeat.update(state=state, reason=reason, **status)
        self.journal.put(events.state(state, self.step, reason))
        self.flush()

    def flush(self) -> bool:
        """Write what waits. When the disk is full the run pauses and this is False."""
        try:
            self.journal.flush()
        except DiskFullError as error:
            self.pause_for_space(error)
            return False
        return True

    def answer(self, line: ControlLine, reason: str = "", *, applied: bool) -> None:
        """Record the one answer to a request."""
        status: events.Answer = "applied" if applied else "refused"
        self.journal.put(events.request(line.id, line.kind, line.args, status, self.step, reason, line.source))
        self.flush()

    def end_quota(self, interrupted: str = "") -> None:
        """Answer a "step" request that is done or was cut short."""
        quota, self.quota = self.quota, None
        if quota is not None:
            reason = f"took {quota.taken} of {quota.n} steps: {interrupted}" if interrupted else ""
            self.answer(quota.line, reason, applied=True)

    def settings_changed(self) -> None:
        """Record the settings in force after a change."""
        settings = self.trainer.settings()
        self.saving.settings_changed()
        self.heartbeat.update(settings=settings)
        self.journal.put(events.settings(self.step, settings))

    def retry_writes(self) -> None:
        """Write everything that a full disk held back. Raises RequestRefused when there is still no room."""
        try:
            self.journal.flush()
            if self.saving.owed:
                self.saving.save()
                self.journal.flush()
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise RequestRefused(f"{describe_full(error)}; the run stays paused and keeps its state") from error

    def pause_for_space(self, error: BaseException) -> None:
        """Pause because the disk is full, and say so; again and again it is said once."""
        if self._failing or (self.state == "paused" and self.heartbeat.reason.startswith("disk full")):
            return
        reason = f"{describe_full(error)}; the state is kept in memory: free some space and resume"
        self.heartbeat.update(state="paused", reason=reason)
        self.journal.put(events.state("paused", self.step, reason))
        self.end_quota("the disk is full")

    # Saving and ending

    def _save(self) -> None:
        if self.saving.policy.async_save:
            self.saving.save_later()
            return
        try:
            self.saving.save()
        except OSError as error:
            if not is_disk_full(error):
                raise
            self.pause_for_space(error)
        self.flush()

    def _collect_saves(self) -> None:
        """Take note of background saves that ended, and answer who asked for them."""
        for error, line in self.saving.collect():
            full = error is not None and is_disk_full(error)
            if line is not None:
                reason = "" if error is None else describe_full(error) if full else f"{type(error).__name__}: {error}"
                self.answer(line, reason, applied=error is None)
            if error is not None and full:
                self.pause_for_space(error)
            elif error is not None and not self._failing:
                raise error
        self.flush()

    def _finish(self, state: RunState, reason: str) -> None:
        """Save what is not saved, answer what is open, and end."""
        before = self.state
        self.heartbeat.update(state="stopping", reason=reason)
        try:
            self.saving.wait()
            self._collect_saves()
            if self.saving.needed:
                self.saving.save()
            self.journal.flush()
        except OSError as error:
            if not is_disk_full(error):
                raise
            self.heartbeat.update(state=before, reason="")
            self._cannot_finish(state, reason, error)
            return
        self.end_quota(reason)
        self._answer_stop(applied=True)
        serve(self, closing=reason)
        self.move_to(state, reason)
        self._ended = True
        self._close()

    def _answer_stop(self, reason: str = "", *, applied: bool) -> bool:
        """Answer the request to stop; False when there is none."""
        line, self.stop_line = self.stop_line, None
        if line is not None:
            self.answer(line, reason, applied=applied)
        return line is not None

    def _cannot_finish(self, state: RunState, reason: str, error: OSError) -> None:
        """The disk is full at the end: wait for space, unless whoever ends the run cannot wait."""
        self._ending = None
        self.pause_for_space(error)
        if self._answer_stop(f"no checkpoint could be written: {describe_full(error)}", applied=False):
            return
        if state == "paused":
            self._ended = True
            self._close()
        elif state != "finished":
            raise RunError(f"{reason}, but no checkpoint could be written: {describe_full(error)}") from error

    def _abandon(self) -> None:
        """A step was cut off in the middle: go back to the newest checkpoint, so that no half-done update stays."""
        step, restored = self.step, self.saving.restore_newest()
        self._collect_saves()
        reason = f"interrupted after step {step}; back at the checkpoint of step {restored}"
        self.end_quota(reason)
        self.heartbeat.update(step=self.step, settings=self.trainer.settings())
        self.move_to("paused", reason)
        self._close()

    def _fail(self, error: BaseException) -> None:
        self._failing = True
        message = f"{type(error).__name__}: {error}"
        self.saving.wait()
        self._collect_saves()
        self.end_quota(message)
        self._answer_stop(f"the run failed: {message}", applied=False)
        self.journal.put(events.error(self.step, message, "".join(tracebacks.format_exception(error))))
        self.move_to("failed", message)
        self._close()

    def _close(self) -> None:
        self.saving.wait()
        self.journal.close()
        self.heartbeat.close(parked=self.state == "paused")
