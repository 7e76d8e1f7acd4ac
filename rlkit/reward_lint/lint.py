"""`lint_rewards`: from recorded rollouts, and perhaps a function, to a report."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlkit.errors import DataError
from rlkit.reward_lint import checks
from rlkit.reward_lint.report import Finding, LintReport
from rlkit.reward_lint.trial import Trial, check_trial, try_out
from rlkit.runs.handle import Run
from rlkit.runs.reader import RunReader

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["lint_rewards"]

_TOTAL = "reward"
_PREFIX = "reward/"


def lint_rewards(
    rollouts: Any,
    fn: Callable[..., Any] | Any = None,
    *,
    name: str | None = None,
    data: Any = None,
    weights: Mapping[str, float] | None = None,
    max_rows: int = 512,
) -> LintReport:
    """Looks for what is wrong with rewards in rollouts that were recorded, without a model or a GPU.

    Checked are, for every term: numbers that are none, no variation, a size that drowns the other terms, abstentions,
    correlation with length and with other terms, and the share of groups without spread. A function is called on the
    recorded responses, twice, and checked like a recorded term, and for errors, time and repeatability.

    Args:
        rollouts: a `Run`, the folder of one, or its rollouts: a DataFrame, a list of dicts, or a dict of columns. The
            columns are those of a run's rollout table: "prompt", "response", "reward", "reward/<term>", "group",
            "step", "row", "response_length" (tokens), "finish_reason"; all but what is used may be missing.
        fn: a reward function or `RewardController` to check besides; a recorded term of the same name is left out. A
            call without an end needs a controller with a timeout.
        name: of the term that `fn` is; its own when left out.
        data: the rows of the dataset, by the column "row", for a function that asks for dataset columns. Other columns
            of the rollouts are given to it too.
        weights: of the terms, for their sizes; those in force for a run, else 1.
        max_rows: of the rollouts, the last so many are used when there is a `fn`. Messages count samples from the first
            that is used.

    Raises:
        DataError: there are no rollouts, or no reward among them and no function; `fn` needs a column that is missing.
        RunError: the folder is not a run.
        RewardError: the function's parameters cannot be filled.
    """
    table = _table(rollouts)
    if fn is not None:
        table = table.tail(max_rows).reset_index(drop=True)
    if not len(table):
        raise DataError("there are no rollouts to look at; let the run take a step first, or pass recorded ones")
    recorded = {str(c).removeprefix(_PREFIX): list(table[c]) for c in table.columns if str(c).startswith(_PREFIX)}
    trial = None if fn is None else try_out(fn, name, table, data)
    if trial is not None:
        recorded.pop(trial.name, None)
    if not recorded and trial is None and _TOTAL in table:
        recorded = {_TOTAL: list(table[_TOTAL])}
    if not recorded and trial is None:
        raise DataError(
            f"these rollouts hold no rewards: expected a column 'reward' or 'reward/<term>', got {list(table.columns)}"
        )
    findings = list(_findings(table, recorded, trial, _weights(rollouts) if weights is None else weights))
    names = [*recorded, *([] if trial is None else [trial.name])]
    return LintReport.of(findings, names, len(table))


def _table(rollouts: Any) -> pd.DataFrame:
    """The rollouts as a table with rows numbered from 0."""
    import pandas as pd

    if isinstance(rollouts, Run):
        frame = rollouts.rollouts
    elif isinstance(rollouts, str | os.PathLike):
        frame = RunReader(rollouts).rollouts()
    elif isinstance(rollouts, pd.DataFrame):
        frame = rollouts
    elif isinstance(rollouts, Mapping) or (
        isinstance(rollouts, Sequence) and all(isinstance(r, Mapping) for r in rollouts)
    ):
        try:
            frame = pd.DataFrame(rollouts)
        except ValueError as error:
            raise DataError(f"the columns of the rollouts must be lists of one length: {error}") from error
    else:
        raise DataError(
            f"rollouts are a Run, the folder of one, a DataFrame, a list of dicts or a dict of columns; "
            f"given {type(rollouts).__name__}"
        )
    return frame.reset_index(drop=True)


def _weights(rollouts: Any) -> Mapping[str, float]:
    run = Run(rollouts) if isinstance(rollouts, str | os.PathLike) else rollouts
    found = run.settings.get("reward_weights") if isinstance(run, Run) else None
    return found if isinstance(found, Mapping) else {}


def _findings(
    table: pd.DataFrame, recorded: Mapping[str, Sequence[Any]], trial: Trial | None, weights: Mapping[str, float]
) -> Iterator[Finding]:
    import pandas as pd

    columns = {name: checks.as_numbers(values) for name, values in recorded.items()}
    for name, values in recorded.items():
        yield from checks.check_values(name, values)
    if trial is not None:
        columns[trial.name] = trial.values
        yield from check_trial(trial)
    terms = pd.DataFrame(columns, dtype="float64")
    lengths = _lengths(table)
    for term, column in terms.items():
        failed = trial is not None and trial.name == term and trial.failed == len(table)
        if not failed:  # said already
            yield from checks.check_abstention(str(term), column)
        yield from checks.check_constant(str(term), column)
        yield from checks.check_length(str(term), column, lengths)
    yield from checks.check_scale(terms, weights)
    yield from checks.check_pairs(terms)
    if len(table) < checks.MIN_SAMPLES:
        text = f"only {len(table)} rollouts: correlations need {checks.MIN_SAMPLES} and were not looked at."
        yield Finding("samples", _TOTAL, "info", len(table), text)
    if "group" in table:
        yield from _group_findings(table, terms, None if trial is None else trial.name)


def _group_findings(table: pd.DataFrame, terms: pd.DataFrame, tried: str | None) -> Iterator[Finding]:
    """Groups without spread in what is optimised (the sum, a lone term, a function that is tried) and in its parts."""
    import pandas as pd

    keys = ["step", "group"] if "step" in table else ["group"]
    groups = table.groupby(keys, sort=False).ngroup()
    has_total = _TOTAL in table and _TOTAL not in terms
    if has_total:
        total = pd.Series(checks.as_numbers(list(table[_TOTAL])), dtype="float64")
        yield from checks.check_groups(_TOTAL, total, groups, alone=True)
    parts = [name for name in terms if name != tried]
    for term, column in terms.items():
        is_the_sum = has_total and parts == [term]
        if not is_the_sum:
            alone = term == tried or len(terms.columns) == 1
            yield from checks.check_groups(str(term), column, groups, alone)


def _lengths(table: pd.DataFrame) -> pd.Series | None:
    """Length of each response in tokens, or in characters where tokens were not recorded."""
    import pandas as pd

    if "response_length" in table:
        return pd.Series(checks.as_numbers(list(table["response_length"])), dtype="float64")
    if "response" in table:
        return pd.Series([len(r) if isinstance(r, str) else math.nan for r in table["response"]], dtype="float64")
    return None
