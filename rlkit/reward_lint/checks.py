"""The checks of recorded reward terms. Each takes what was recorded and returns findings; none changes anything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlkit.reward_lint.report import Finding

if TYPE_CHECKING:
    import pandas as pd

MIN_SAMPLES = 16
"""Fewer pairs of numbers say too little about a correlation: 16 that are unrelated pass 0.6 less than once in fifty."""

LENGTH_RHO = 0.6
"""Rank correlation with length above which length alone tells over a third of how a reward orders responses."""

REDUNDANT_RHO = 0.95
"""Rank correlation above which two terms order responses the same way, so that one would do."""

OPPOSED_RHO = -0.8
"""Rank correlation below which two terms mostly cancel each other."""

SCALE_RATIO = 10.0
"""Times the median size of the other terms at which nine tenths of the sum of two are one of them."""

FLAT_GROUPS = 0.5
"""Share of groups without spread, from which nothing is learned, at which most of the sampling is wasted."""

ABSTENTIONS = 0.2
"""Share of abstentions at which a term's statistics rest on a selection of samples."""

_NAMED = 5
"""Samples named in a message."""


def named(rows: Sequence[int]) -> str:
    """Samples as text, the first few by number."""
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return f"sample{'' if len(rows) == 1 else 's'} {', '.join(map(str, rows[:_NAMED]))}{more}"


def check_values(term: str, values: Sequence[Any]) -> Iterator[Finding]:
    """Every entry is a finite number, or missing where the term abstained."""
    wrong = [row for row, value in enumerate(values) if _number(value) is None]
    if wrong:
        value = values[wrong[0]]
        yield Finding(
            "values",
            term,
            "error",
            len(wrong),
            f"no finite number in {named(wrong)} (the first is {value!r:.40}). One such reward makes a whole batch's "
            "statistics useless; return a number, or None to abstain.",
        )


def as_numbers(values: Sequence[Any]) -> list[float]:
    """The entries as numbers, NaN for those that abstain or are none."""
    return [math.nan if (number := _number(value)) is None else number for value in values]


def _number(value: Any) -> float | None:
    """NaN for an abstention, None for what is no finite number."""
    if value is None:
        return math.nan
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isinf(number) else number


def check_abstention(term: str, values: pd.Series) -> Iterator[Finding]:
    """The share of samples that the term abstains from."""
    share = float(values.isna().mean()) if len(values) else 0.0
    if share == 1.0:
        text = "abstains from every sample, so that it has no effect. See that it finds what it looks for."
        yield Finding("abstention", term, "error", share, text)
    elif share > ABSTENTIONS:
        text = f"abstains from {share:.0%} of the samples; the rest is a selection, and may be an easy one."
        yield Finding("abstention", term, "warning", share, text)


def check_constant(term: str, values: pd.Series) -> Iterator[Finding]:
    """The term tells responses apart at all."""
    given = values.dropna()
    if len(given) > 1 and given.nunique() == 1:
        number = float(given.iloc[0])
        text = (
            f"is {number:g} for all {len(given)} samples: nothing can be learned from it. A format that is never met "
            "or a column that is never right looks like this; try it on a response that should score well."
        )
        yield Finding("constant", term, "warning", number, text)


def check_scale(terms: pd.DataFrame, weights: Mapping[str, float]) -> Iterator[Finding]:
    """No weighted term is much larger than the others, in spread or in mean."""
    weighted = {name: terms[name].dropna() * weights.get(str(name), 1.0) for name in terms}
    varied = {name: column for name, column in weighted.items() if column.nunique() > 1}
    spreads = {str(name): float(column.std()) for name, column in varied.items()}
    means = {str(name): abs(float(column.mean())) for name, column in varied.items()}
    for name, spread in spreads.items():
        others = _median([value for other, value in spreads.items() if other != name])
        if others > 0 and spread / others > SCALE_RATIO:
            yield Finding(
                "scale",
                name,
                "warning",
                spread / others,
                f"varies {spread / others:.0f} times as much as the other terms do (weighted), which it drowns. Lower "
                "its weight, rescale it, or normalise each term by itself.",
            )
            continue
        sizes = _median([means[other] + spreads[other] for other in spreads if other != name])
        if sizes > 0 and means[name] / sizes > SCALE_RATIO:
            yield Finding(
                "scale",
                name,
                "warning",
                means[name] / sizes,
                f"has a mean {means[name] / sizes:.0f} times as large as the other terms (weighted). A critic must "
                "learn that offset first; subtract it, or normalise the term.",
            )


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    if not ordered:
        return 0.0
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def rank_correlation(first: pd.Series, second: pd.Series) -> float | None:
    """Spearman's rho over the rows where both are given; None where there are too few or one is constant."""
    both = first.notna() & second.notna()
    a, b = first[both], second[both]
    if len(a) < MIN_SAMPLES or a.nunique() < 2 or b.nunique() < 2:
        return None
    return float(a.rank().corr(b.rank()))


def check_length(term: str, values: pd.Series, lengths: pd.Series | None) -> Iterator[Finding]:
    """The term is not one of length in disguise."""
    rho = None if lengths is None else rank_correlation(values, lengths)
    if rho is not None and abs(rho) > LENGTH_RHO:
        way = "longer" if rho > 0 else "shorter"
        yield Finding(
            "length",
            term,
            "warning",
            rho,
            f"goes with the length of the response (rank correlation {rho:+.2f}): it can be raised by writing {way}. "
            "If that is not meant, compare responses of equal length, or add a term for length.",
        )


def check_pairs(terms: pd.DataFrame) -> Iterator[Finding]:
    """No two terms say the same or the opposite."""
    for first, second in itertools.combinations(terms.columns, 2):
        rho = rank_correlation(terms[first], terms[second])
        if rho is not None and rho > REDUNDANT_RHO:
            text = f"order the responses alike (rank correlation {rho:+.2f}): together they are one term counted twice."
        elif rho is not None and rho < OPPOSED_RHO:
            text = f"pull in opposite directions (rank correlation {rho:+.2f}), so that their sum hardly changes."
        else:
            continue
        yield Finding("terms", f"{first} / {second}", "warning", rho, text)


def check_groups(name: str, values: pd.Series, groups: pd.Series, alone: bool) -> Iterator[Finding]:
    """Enough groups have responses with different rewards.

    Args:
        name: of the term, or "reward" for the sum.
        values: (rows) rewards.
        groups: (rows) equal for responses to one prompt in one step.
        alone: whether this is all that is optimised, rather than one part of it.
    """
    given = values.dropna().groupby(groups)
    sizes, kinds = given.size(), given.nunique()
    judged = kinds[sizes > 1]
    share = float((judged == 1).mean()) if len(judged) else 0.0
    if share > FLAT_GROUPS:
        text = (
            f"{share:.0%} of the {len(judged)} groups have the same reward for all responses, and advantages of 0: "
            "their sampling is wasted. Choose prompts of middling difficulty, sample more responses a prompt, or grade "
            "more finely."
        )
        yield Finding("groups", name, "warning" if alone else "info", share, text)
