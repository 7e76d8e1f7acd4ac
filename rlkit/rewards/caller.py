"""How a reward function is called: where, with which limit, and what a call that fails comes to."""

from __future__ import annotations

import logging
import math
import numbers
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, Self

from rlkit.errors import ConfigError, RewardError
from rlkit.rewards.calls import Call, Calls, InProcess, Outcome
from rlkit.rewards.event_loop import EventLoopCalls
from rlkit.rewards.function import RewardFunction

__all__ = ["OnError", "RewardCaller", "Score"]

OnError = Literal["raise", "abstain"]

_LOG = logging.getLogger("rlkit")
_LOGGED = 8
"""Failed samples of one scoring that get a line of their own in the log; the rest are counted."""


@dataclass(frozen=True)
class Score:
    """The reward of one sample."""

    value: float
    """NaN where the function abstained or failed."""
    seconds: float
    """Time of its call; of a batched call its share."""
    failure: Literal["", "timeout", "error"] = ""
    reason: str = ""
    """What went wrong, in full."""


class RewardCaller:
    """Calls a reward function for batches of samples. Close it, or use it in a `with`, when it may have processes.

    Plain functions are called here, one after the other. With `workers`, or with a `timeout`, they are called in
    processes (a call that does not end cannot be ended otherwise); the time a process takes to start does not count.
    Async functions are awaited on an event loop of rlkit's own thread, several at a time, also from a notebook cell.

    Args:
        function: the reward function.
        timeout: seconds a call. A per-sample function has one call a sample.
        workers: most processes at a time; 0 for none, or one where `timeout` needs it.
        on_error: what a call that raises, times out or gives no reward comes to: "raise" a RewardError; "abstain" NaN
            for its samples, counted, with a warning in the log "rlkit".
        batch_size: samples in one call of a batched function; None for all in one.
        max_concurrent: calls of an async function that are awaited at the same time.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        function: RewardFunction,
        *,
        timeout: float | None = None,
        workers: int = 0,
        on_error: OnError = "raise",
        batch_size: int | None = None,
        max_concurrent: int = 16,
    ) -> None:
        if timeout is not None and not (_is_number(timeout) and 0 < timeout < math.inf):
            raise ConfigError(f"timeout must be seconds above 0, or None for no limit; given {timeout!r}")
        if on_error not in ("raise", "abstain"):
            raise ConfigError(f"on_error must be 'raise' or 'abstain', given {on_error!r}")
        _require_int("workers", workers, 0)
        _require_int("max_concurrent", max_concurrent, 1)
        if batch_size is not None:
            _require_int("batch_size", batch_size, 1)
        self.function = function
        self.timeout = timeout
        self.workers = workers
        self.on_error = on_error
        self.batch_size = batch_size
        self.max_concurrent = max_concurrent
        self._failures = {"timeouts": 0, "errors": 0}
        self._calls: Calls | None = None
        self._lock = threading.Lock()

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        columns: Sequence[Mapping[str, Any]],
        response_lengths: Sequence[int] | None = None,
        finish_reasons: Sequence[str] | None = None,
    ) -> list[float]:
        """The reward of each sample, NaN where the function abstained or failed.

        Args:
            prompts, responses: text, one per sample.
            columns: dataset columns of each sample; one that some samples lack is None for them.
            response_lengths: tokens, where the function asks for them.
            finish_reasons: "stop" or "length", where the function asks for them.

        Raises:
            RewardError: the function asks for something that is missing. With `on_error="raise"` also: a call raised or
                took too long, or its answer has the wrong length, type, or is not finite. Names function and sample.
        """
        scores = self.scores(prompts, responses, columns, response_lengths, finish_reasons)
        self._report(scores, prompts)
        return [score.value for score in scores]

    def scores(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        columns: Sequence[Mapping[str, Any]],
        response_lengths: Sequence[int] | None = None,
        finish_reasons: Sequence[str] | None = None,
    ) -> list[Score]:
        """Like `score`, with the time and the failure of each sample, which are neither counted nor logged."""
        calls = self.function.calls(prompts, responses, columns, response_lengths, finish_reasons, self.batch_size)
        found: list[Score | None] = [None] * len(responses)
        with self._lock, closing(self._means().run(calls)) as outcomes:  # type: ignore[type-var]
            for position, outcome in outcomes:
                call = calls[position]
                for row, score in zip(call.rows, self._scores(call, outcome), strict=True):
                    found[row] = score
        return [score for score in found if score is not None]

    def take_failures(self) -> dict[str, int]:
        """Samples without a reward since the last call, {"timeouts": n, "errors": m}; 0 while `on_error` is "raise"."""
        taken, self._failures = self._failures, {"timeouts": 0, "errors": 0}
        return taken

    def close(self) -> None:
        """Ends the processes or the event loop; scoring again starts them anew."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.close()

    def _means(self) -> Calls:
        """Where calls are made; made anew when the function was replaced."""
        fn = self.function.fn
        if self._calls is None or getattr(self._calls, "fn", None) is not fn:
            self.close()
            if self.workers or (self.timeout is not None and not self.function.is_async):
                from rlkit.rewards.workers import WorkerPool

                self._calls = WorkerPool(fn, self.function.name, self.timeout, max(self.workers, 1))
            elif self.function.is_async:
                self._calls = EventLoopCalls(fn, self.timeout, self.max_concurrent)
            else:
                self._calls = InProcess(fn)
        return self._calls

    def _scores(self, call: Call, outcome: Outcome) -> list[Score]:
        """The scores of a call's samples; raises for the first that failed where that is asked for."""
        seconds = outcome.seconds / len(call.rows)
        numbers_or_errors: list[float | RewardError]
        try:
            if outcome.failure:
                raise self._error(outcome) from outcome.error
            numbers_or_errors = self.function.numbers(call, outcome.answer)
        except RewardError as error:
            if self.on_error == "raise":
                raise
            numbers_or_errors = [error] * len(call.rows)
        scores = []
        for number in numbers_or_errors:
            if isinstance(number, RewardError):
                if self.on_error == "raise":
                    raise number
                scores.append(Score(math.nan, seconds, outcome.failure or "error", str(number)))
            else:
                scores.append(Score(number, seconds))
        return scores

    def _error(self, outcome: Outcome) -> RewardError:
        error = RewardError(f"reward {self.function.name!r} {outcome.reason}")
        if outcome.trace:
            error.add_note(f"In the process that called it:\n{outcome.trace}")
        return error

    def _report(self, scores: Sequence[Score], prompts: Sequence[str]) -> None:
        """Count and log what failed."""
        failed = [(row, score) for row, score in enumerate(scores) if score.failure]
        for kind in ("timeout", "error"):
            self._failures[f"{kind}s"] += sum(score.failure == kind for _, score in failed)
        for row, score in failed[:_LOGGED]:
            _LOG.warning(
                "reward term %r abstains from sample %d (prompt %.80r): %s",
                self.function.name,
                row,
                prompts[row],
                score.reason,
            )
        if len(failed) > _LOGGED:
            rest = ", ".join(str(row) for row, _ in failed[_LOGGED:])
            _LOG.warning("reward term %r abstains from these samples too: %s", self.function.name, rest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_calls": None, "_lock": None, "_failures": {"timeouts": 0, "errors": 0}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _require_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, given {value!r}")
