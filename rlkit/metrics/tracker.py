"""Collects the metrics and stage spans of a step, from any thread, at about a microsecond a value."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import TracebackType
from typing import Any, TypedDict, TypeVar

from rlkit.errors import ConfigError, DataError
from rlkit.metrics.catalogue import default_reduction
from rlkit.metrics.reduce import REDUCTIONS, Reduction, ReductionState, from_state
from rlkit.runs.protocol import Span, StepMetrics

_Item = TypeVar("_Item")
_PLAIN = (float, int)


class TrackerState(TypedDict):
    """What one rank hands to another, as JSON values."""

    metrics: dict[str, ReductionState]
    spans: list[tuple[str, float, float, int]]


class MetricsTracker:
    """Metrics of the step being taken.

    `add` may be called from several threads. Device tensors are copied without waiting for the device and read in
    one transfer at `flush`; nothing keeps an autograd graph alive.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[str, Any, Any, bool]] = deque()
        self._spans: deque[Span] = deque()
        self._declared: dict[str, type[Reduction]] = {}
        self._reductions: dict[str, Reduction] = {}
        self._lock = Lock()
        self._flushed_at = time.perf_counter()
        self._unread = False
        """Whether device tensors may be among the pending values."""

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: the declarations. Values of a step in progress stay here."""
        return {"declared": dict(self._declared)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MetricsTracker.__init__(self)
        self._declared.update(state["declared"])

    def declare(self, name: str, reduction: type[Reduction] | str) -> None:
        """Say how a metric is reduced: a class of `rlkit.metrics.reduce` or its kind ("mean", "sum", "min", ...).

        Undeclared metrics use the table `METRICS`, else the mean. Raises ConfigError for an unknown kind, and when
        the metric already has values that were reduced in another way.
        """
        cls = REDUCTIONS.get(reduction) if isinstance(reduction, str) else reduction
        if cls is None:
            raise ConfigError(f"unknown reduction {reduction!r} for {name!r}; known: {', '.join(REDUCTIONS)}")
        with self._lock:
            self._drain()
            current = self._reductions.get(name)
            if current is not None and type(current) is not cls:
                raise ConfigError(f"{name!r} already has values in this step, reduced by {current.kind!r}")
            self._declared[name] = cls

    def add(self, name: str, value: Any, count: float = 1) -> None:
        """Take in a value that stands for `count` items (tokens, rows, ...).

        Args:
            value: a number, or a tensor or array with one element. Raises DataError for anything else.
        """
        self._pending.append((name, value if type(value) in _PLAIN else self._number(name, value), count, False))

    def add_sum_count(self, name: str, total: Any, count: Any) -> None:
        """Take in a sum over `count` items; both are numbers or tensors with one element."""
        total = total if type(total) in _PLAIN else self._number(name, total)
        count = count if type(count) in _PLAIN else self._number(name, count)
        self._pending.append((name, total, count, True))

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What is added within it counts only if the block ends without an error."""
        values, spans = len(self._pending), len(self._spans)
        try:
            yield
        except BaseException:
            with self._lock:
                while len(self._pending) > values:
                    self._pending.pop()
                while len(self._spans) > spans:
                    self._spans.pop()
            raise

    def span(self, name: str, rank: int = 0) -> _SpanTimer:
        """`with tracker.span("actor"): ...` records when the block began and how long it took, also if it raises."""
        return _SpanTimer(self._spans, name, rank)

    def flush(self, step: int) -> StepMetrics:
        """Reduce everything that was added since the last flush and start afresh. Metrics without values are absent."""
        with self._lock:
            self._drain()
            now = time.perf_counter()
            elapsed, self._flushed_at = now - self._flushed_at, now
            reductions, self._reductions = self._reductions, {}
            metrics = {name: r.value(elapsed) for name, r in reductions.items() if r.has_value}
            return StepMetrics(step, metrics, sorted(_take(self._spans), key=lambda span: span.start))

    def discard(self) -> None:
        """Forget what was added since the last flush: the step it belonged to was abandoned."""
        with self._lock:
            _take(self._pending)
            _take(self._spans)
            self._reductions = {}
            self._flushed_at = time.perf_counter()

    def state(self) -> TrackerState:
        """What was added so far, unreduced, for `merge` on another rank. Nothing is cleared."""
        with self._lock:
            self._drain()
            return {
                "metrics": {name: reduction.state() for name, reduction in self._reductions.items()},
                "spans": [(span.name, span.start, span.duration_s, span.rank) for span in list(self._spans)],
            }

    def merge(self, state: TrackerState) -> None:
        """Pool another rank's `state`. ConfigError, and nothing changes, when a metric is reduced in two ways."""
        with self._lock:
            self._drain()
            theirs = {name: from_state(item) for name, item in state["metrics"].items()}
            for name, reduction in theirs.items():
                mine = self._reductions.get(name)
                if mine is not None and type(mine) is not type(reduction):
                    raise ConfigError(f"{name!r} is reduced by {mine.kind!r} here and by {reduction.kind!r} there")
            for name, reduction in theirs.items():
                if name in self._reductions:
                    self._reductions[name].merge(reduction)
                else:
                    self._reductions[name] = reduction
            self._spans.extend(Span(*item) for item in state["spans"])

    def _number(self, name: str, value: Any) -> Any:
        """A Python number, or a private copy of a device tensor that is read later."""
        device = getattr(value, "device", None)
        if device is not None and hasattr(value, "detach"):
            if value.numel() != 1:
                shape = tuple(value.shape)
                raise DataError(f"metric {name!r} takes a number or a tensor with one element, got shape {shape}")
            if device.type == "cpu":
                return value.item()
            self._unread = True
            return value.detach().reshape(()).clone()
        if isinstance(value, str | bytes):
            raise DataError(f"metric {name!r} takes a number, got the text {value!r}")
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise DataError(f"metric {name!r} takes a number or a tensor with one element, got {value!r}") from error

    def _drain(self) -> None:
        """Move pending values into their reductions, device tensors in one transfer per device and dtype."""
        pending = _take(self._pending)
        numbers: dict[int, float] = {}
        if self._unread:
            self._unread = False
            numbers = _read_tensors([item for entry in pending for item in entry[1:3] if type(item) not in _PLAIN])
        for name, value, count, pair in pending:
            reduction = self._reductions.get(name)
            if reduction is None:
                cls = self._declared.get(name) or default_reduction(name)
                reduction = self._reductions[name] = cls()
            feed = reduction.add_sum_count if pair else reduction.add
            if numbers:
                value, count = numbers.get(id(value), value), numbers.get(id(count), count)
            feed(value, count)


class _SpanTimer:
    __slots__ = ("_began", "_name", "_rank", "_spans", "_start")

    def __init__(self, spans: deque[Span], name: str, rank: int) -> None:
        self._spans, self._name, self._rank = spans, name, rank

    def __enter__(self) -> None:
        self._start, self._began = time.time(), time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spans.append(Span(self._name, self._start, time.perf_counter() - self._began, self._rank))


def _take(items: deque[_Item]) -> list[_Item]:
    """Everything in the deque now; what other threads append meanwhile stays for the next time."""
    return [items.popleft() for _ in range(len(items))]


def _read_tensors(tensors: list[Any]) -> dict[int, float]:
    """id of each tensor -> its number, with one wait per device."""
    import torch

    numbers: dict[int, float] = {}
    for device in {tensor.device for tensor in tensors}:
        mine = [tensor for tensor in tensors if tensor.device == device]
        values = torch.stack([tensor.double() for tensor in mine]).tolist()
        numbers.update(zip(map(id, mine), values, strict=True))
    return numbers
