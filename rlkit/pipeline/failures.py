"""How a failing controller is named, and how its failure lets go of the batch."""

import traceback
from types import FrameType

from rlkit.errors import RlkitError

__all__ = ["StageError", "clear_frames", "name_error"]


class StageError(RlkitError, RuntimeError):
    """A controller failed with an error that is none of rlkit's own; the original is its `__cause__`."""


def name_error(name: str, error: BaseException) -> BaseException:
    """The error with the controller's name in front, chained to the original; interrupts and exits stay as they are."""
    if not isinstance(error, Exception):
        return error
    kind = type(error)
    named: Exception | None = None
    if isinstance(error, RlkitError):
        try:
            named = kind(f"controller '{name}' failed: {error}")
        except TypeError:  # a subclass that takes other arguments than a message
            named = None
    if named is None:
        named = StageError(f"controller '{name}' failed: {kind.__name__}: {error}")
    named.__cause__ = error
    return named


def clear_frames(error: BaseException) -> None:
    """Empty the finished frames of an error and of those it is chained to: no batch stays alive with a traceback."""
    seen: set[int] = set()
    open_ends: list[BaseException | None] = [error]
    while open_ends:
        link = open_ends.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            for frame, _ in traceback.walk_tb(link.__traceback__):
                _clear_callers(frame)
            open_ends += [link.__cause__, link.__context__]


def _clear_callers(frame: FrameType | None) -> None:
    """Empty a frame and the finished ones that called it: an ended thread's frames live on through `f_back`."""
    while frame is not None:
        try:
            frame.clear()
        except RuntimeError:  # still executing, and so are its callers
            return
        frame = frame.f_back
