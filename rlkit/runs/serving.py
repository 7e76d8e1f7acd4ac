"""What the loop does with each kind of request, at a step boundary. A bad one is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlkit.errors import RequestRefused, RlkitError
from rlkit.runs.control import ControlLine, check_changes, step_count
from rlkit.runs.journal import describe_full, is_disk_full

if TYPE_CHECKING:
    from rlkit.runs.loop import RunLoop


class StepQuota:
    """Steps that a "step" request still asks for."""

    def __init__(self, line: ControlLine, n: int) -> None:
        self.line, self.n, self.taken = line, n, 0


def serve(loop: RunLoop, closing: str = "") -> None:
    """Answer every request that has come in. `closing`: why the run ends, so that they are all refused."""
    for line in loop.control.poll():
        try:
            if line.problem:
                raise RequestRefused(line.problem)
            if closing or loop.ending:
                raise RequestRefused(f"the run is ending: {closing or loop.ending}")
            done = _HANDLERS[line.kind](loop, line)
        except RlkitError as error:
            loop.answer(line, str(error), applied=False)
        else:
            if done:
                loop.answer(line, applied=True)


def _no_args(line: ControlLine) -> None:
    if line.args:
        raise RequestRefused(f"{line.kind} takes no arguments; got {line.args!r}")


def _pause(loop: RunLoop, line: ControlLine) -> bool:
    _no_args(line)
    if loop.state != "paused":
        loop.end_quota("the run was paused")
        loop.move_to("paused", f"asked from {line.source or 'outside'}")
    return True


def _resume(loop: RunLoop, line: ControlLine) -> bool:
    _no_args(line)
    loop.retry_writes()
    if loop.state != "running":
        loop.move_to("running")
    else:
        loop.end_quota("the run goes on")
    return True


def _step(loop: RunLoop, line: ControlLine) -> bool:
    n = step_count(line.args)
    if loop.state != "paused":
        raise RequestRefused("the run is not paused; pause it first, then take single steps")
    if loop.total_steps is not None and loop.step >= loop.total_steps:
        raise RequestRefused(f"the run has taken all its {loop.total_steps} steps")
    loop.retry_writes()
    loop.quota = StepQuota(line, n)
    loop.move_to("running", f"takes {n} step{'s' if n > 1 else ''}, then pauses")
    return False


def _stop(loop: RunLoop, line: ControlLine) -> bool:
    _no_args(line)
    loop.stop_line = line
    loop.end("stopped", f"asked from {line.source or 'outside'}")
    return False


def _set(loop: RunLoop, line: ControlLine) -> bool:
    check_changes(line.args, loop.trainer.settings())
    try:
        loop.trainer.set(**line.args)
    except RlkitError:
        raise
    except Exception as error:
        raise RequestRefused(f"{type(error).__name__}: {error}") from error
    loop.settings_changed()
    return True


def _checkpoint(loop: RunLoop, line: ControlLine) -> bool:
    _no_args(line)
    if loop.saving.policy.async_save:
        loop.saving.save_later(line)
        return False
    try:
        loop.saving.save()
    except OSError as error:
        if not is_disk_full(error):
            raise
        loop.pause_for_space(error)
        raise RequestRefused(f"{describe_full(error)}; the older checkpoints are untouched") from error
    return True


_HANDLERS: dict[str, Callable[[RunLoop, ControlLine], bool]] = {
    "pause": _pause,
    "resume": _resume,
    "step": _step,
    "stop": _stop,
    "set": _set,
    "checkpoint": _checkpoint,
}
