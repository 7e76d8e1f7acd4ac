"""A reward function tried on recorded responses."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlkit.errors import DataError, RewardError
from rlkit.reward_lint.checks import named
from rlkit.reward_lint.report import Finding
from rlkit.rewards import RewardCaller, RewardFunction, Score

if TYPE_CHECKING:
    import pandas as pd

SLOW_P95_S = 1.0
"""95th percentile of seconds a sample above which scoring a step of 256 rollouts takes minutes."""

OUTLIER_RATIO = 20.0
"""Times the median at which the slowest calls, not the usual ones, decide how long a step waits."""

OUTLIER_S = 0.2
"""Seconds below which a slow call is not worth a word."""

_TABLE = ("step", "row", "group", "prompt", "response", "reward", "response_length", "finish_reason")
_MEASURED = (*_TABLE, "policy_version", "advantage")
"""Columns of a rollout table that are no columns of the dataset."""


@dataclass(frozen=True)
class Trial:
    """What a function gave for the recorded responses."""

    name: str
    scores: Sequence[Score]
    again: Sequence[float]
    """Rewards of a second call."""

    @property
    def values(self) -> list[float]:
        """The rewards, NaN where it abstained or failed."""
        return [score.value for score in self.scores]

    @property
    def failed(self) -> int:
        """Samples whose call failed."""
        return sum(bool(score.failure) for score in self.scores)


def try_out(fn: Any, name: str | None, table: pd.DataFrame, data: Any) -> Trial:
    """Call a function or controller on the recorded prompts and responses, twice.

    Raises:
        DataError: prompts, responses or `data` are missing.
        RewardError: the function's parameters cannot be filled.
    """
    for column in ("prompt", "response"):
        if column not in table:
            raise DataError(f"a function needs the column {column!r} of the rollouts; there are {list(table.columns)}")
    texts = (list(table["prompt"].astype(str)), list(table["response"].astype(str)))
    columns = _dataset_columns(table, data)
    caller = _caller(fn, name)
    if caller is None:
        return _model_trial(fn, name, texts, columns)
    lengths = [int(n) for n in table["response_length"]] if _is_complete(table, "response_length") else None
    reasons = [str(why) for why in table["finish_reason"]] if _is_complete(table, "finish_reason") else None
    with caller:
        scores = caller.scores(*texts, columns, lengths, reasons)
        again = caller.scores(*texts, columns, lengths, reasons)
    return Trial(caller.function.name, scores, [score.value for score in again])


def _is_complete(table: pd.DataFrame, column: str) -> bool:
    return column in table and bool(table[column].notna().all())


def _caller(fn: Any, name: str | None) -> RewardCaller | None:
    """A caller of its own that lets failures pass; None for a controller with a model."""
    own = getattr(fn, "caller", None)
    if isinstance(own, RewardCaller):
        return RewardCaller(
            own.function,
            timeout=own.timeout,
            workers=own.workers,
            on_error="abstain",
            batch_size=own.batch_size,
            max_concurrent=own.max_concurrent,
        )
    if hasattr(fn, "scorer"):
        return None
    return RewardCaller(RewardFunction(fn, name), on_error="abstain")


def _model_trial(fn: Any, name: str | None, texts: tuple[list[str], list[str]], columns: list[dict[str, Any]]) -> Trial:
    """A reward model scores the batch as a whole; its time is shared evenly."""
    label = str(name or fn.name)
    started = time.perf_counter()
    try:
        values = fn.scorer.score(*texts, columns)
        seconds = (time.perf_counter() - started) / max(len(values), 1)
        scores = [Score(float(value), seconds) for value in values]
        again = [float(value) for value in fn.scorer.score(*texts, columns)]
    except RewardError as error:
        scores = [Score(math.nan, 0.0, "error", str(error)) for _ in columns]
        again = [math.nan] * len(columns)
    return Trial(label, scores, again)


def _dataset_columns(table: pd.DataFrame, data: Any) -> list[dict[str, Any]]:
    """For each rollout the columns of its dataset row: of `data`, and others that stand in the table."""
    extra = [c for c in table.columns if c not in _MEASURED and not str(c).startswith("reward/")]
    rows: list[dict[str, Any]] = [{str(c): table[c].iloc[i] for c in extra} for i in range(len(table))]
    if data is None:
        return rows
    if "row" not in table:
        raise DataError("data is looked up by the column 'row', which these rollouts lack; add the columns to them")
    found = []
    for index, row in zip(table["row"], rows, strict=True):
        try:
            known = data[int(index)]
        except (IndexError, KeyError) as error:
            raise DataError(
                f"the rollouts are of dataset row {index}, which data (length {len(data)}) lacks"
            ) from error
        found.append({**(known if isinstance(known, Mapping) else {}), **row})
    return found


def check_trial(trial: Trial) -> Iterator[Finding]:
    """Failures, time and repeatability of a function."""
    for check in (_failures, _latency, _determinism):
        yield from check(trial)


def _failures(trial: Trial) -> Iterator[Finding]:
    for kind, what in (("error", "fails"), ("timeout", "runs into its time limit")):
        rows = [row for row, score in enumerate(trial.scores) if score.failure == kind]
        if rows:
            text = f"{what} on {named(rows)}. The first: {trial.scores[rows[0]].reason}"
            yield Finding("values", trial.name, "error", len(rows), text)


def _latency(trial: Trial) -> Iterator[Finding]:
    seconds = [score.seconds for score in trial.scores]
    median, p95 = quantile(seconds, 0.5), quantile(seconds, 0.95)
    said = f"median {1e3 * median:.3g} ms, 95th percentile {1e3 * p95:.3g} ms a sample"
    limit = max(OUTLIER_S, OUTLIER_RATIO * median)
    slow = sorted((row for row, s in enumerate(seconds) if s > limit), key=lambda row: -seconds[row])
    if p95 > SLOW_P95_S:
        slow = sorted(range(len(seconds)), key=lambda row: -seconds[row])[:3]
        text = f"is slow: {said}; slowest {named(slow)}. Give it workers=..., write it async, or make it cheaper."
        yield Finding("latency", trial.name, "warning", p95, text)
    elif slow:
        text = (
            f"takes {seconds[slow[0]]:.2g} s on {named(slow)} ({said}). A step waits for the slowest call; give it a "
            "timeout=..."
        )
        yield Finding("latency", trial.name, "warning", seconds[slow[0]], text)
    else:
        yield Finding("latency", trial.name, "info", p95, said + ".")


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def _determinism(trial: Trial) -> Iterator[Finding]:
    pairs = zip(trial.scores, trial.again, strict=True)
    rows = [row for row, (score, again) in enumerate(pairs) if not score.failure and not _same(score.value, again)]
    if rows:
        first = trial.scores[rows[0]].value, trial.again[rows[0]]
        text = (
            f"gives another value when called again, for {named(rows)} (first {first[0]:g}, then {first[1]:g}). Runs "
            "do not repeat, and the noise is learned from; seed it, or score at temperature 0."
        )
        yield Finding("determinism", trial.name, "warning", len(rows), text)


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
