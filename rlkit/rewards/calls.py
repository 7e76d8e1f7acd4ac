"""One call of a reward function and what came of it, and the plainest way to make calls: one after the other, here."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["Call", "Calls", "InProcess", "Outcome", "failed", "timed_out"]


@dataclass(frozen=True)
class Call:
    """The arguments of one call, and the samples that it is about."""

    rows: range
    """Indices of the samples; one for a function that is called per sample."""
    named: dict[str, Any]
    """Arguments by name."""
    positional: tuple[Any, ...] = ()
    """Arguments before those."""
    where: str = ""
    """Which samples, for messages: " on sample 3"; empty when it is all of them."""

    def make(self, fn: Callable[..., Any]) -> Any:
        """Calls the function; whatever it raises passes."""
        return fn(*self.positional, **self.named)


@dataclass(frozen=True)
class Outcome:
    """What came of a call."""

    seconds: float
    """Wall-clock time of the call."""
    answer: Any = None
    failure: Literal["", "timeout", "error"] = ""
    reason: str = ""
    """What went wrong, to be put after the function's name: "raised KeyError on sample 2: 'x'"."""
    error: BaseException | None = field(default=None, compare=False)
    """What the function raised, where it is known in this process."""
    trace: str = ""
    """The traceback of another process."""


class Calls(Protocol):
    """A way to make calls."""

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Outcome]]:
        """Makes the calls and yields (position, outcome) as they end. Closing the iterator gives up on the rest."""
        ...

    def close(self) -> None:
        """Ends what runs beside this thread; the next `run` starts it anew."""
        ...


class InProcess:
    """Calls one after the other in this thread, without a time limit."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Outcome]]:
        """See `Calls.run`."""
        for position, call in enumerate(calls):
            started = time.perf_counter()
            try:
                answer = call.make(self.fn)
            except Exception as error:
                yield position, failed(call, error, time.perf_counter() - started)
                continue
            if inspect.iscoroutine(answer):
                answer.close()
                reason = "returned a coroutine; write it as `async def`, then its answer is awaited"
                yield position, Outcome(time.perf_counter() - started, failure="error", reason=reason)
                continue
            yield position, Outcome(time.perf_counter() - started, answer)

    def close(self) -> None:
        """See `Calls.close`; there is nothing to end."""


def failed(call: Call, error: BaseException, seconds: float) -> Outcome:
    """The outcome of a call that raised."""
    reason = f"raised {type(error).__name__}{call.where}: {error}"
    return Outcome(seconds, failure="error", reason=reason, error=error)


def timed_out(call: Call, limit: float, seconds: float) -> Outcome:
    """The outcome of a call that was given up at its limit (seconds)."""
    return Outcome(seconds, failure="timeout", reason=f"took longer than its limit of {limit:g} s{call.where}")
