"""Reductions pool raw parts. Expected values are computed by hand."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.errors import ConfigError
from rlkit.metrics.reduce import Last, Max, Mean, Min, Rate, Reduction, Sum, from_state

NUMBERS = st.lists(st.integers(-1000, 1000), min_size=1, max_size=12)


def reduced(cls: type[Reduction], *values: float) -> Reduction:
    reduction = cls()
    for value in values:
        reduction.add(value)
    return reduction


def test_two_ranks_pool_their_counts_instead_of_averaging_averages():
    mine, theirs = Mean(), Mean()
    mine.add_sum_count(3, 12)
    theirs.add_sum_count(3, 4)
    mine.merge(theirs)
    assert mine.value(1.0) == 0.375  # 6 / 16; the mean of means would be 0.5


def test_a_mean_weighs_each_value_by_its_count():
    mean = Mean()
    mean.add(1.0, 3)
    mean.add(5.0, 1)
    assert mean.value(1.0) == 2.0


@pytest.mark.parametrize(
    ("cls", "expected"), [(Mean, 2.0), (Sum, 6.0), (Min, 1.0), (Max, 3.0), (Last, 2.0)], ids=lambda item: str(item)
)
def test_each_reduction_of_one_three_two(cls: type[Reduction], expected: float):
    assert reduced(cls, 1.0, 3.0, 2.0).value(1.0) == expected


def test_a_rate_without_seconds_uses_the_time_since_the_last_flush():
    assert reduced(Rate, 30.0, 20.0).value(10.0) == 5.0


def test_a_rate_of_ranks_adds_amounts_and_takes_the_longest_time():
    mine, theirs = Rate(), Rate()
    mine.add_sum_count(100, 2.0)
    theirs.add_sum_count(300, 4.0)
    mine.merge(theirs)
    assert mine.value(99.0) == 100.0  # 400 tokens in 4 s


@pytest.mark.parametrize("cls", [Min, Max])
def test_nan_is_not_hidden_by_min_and_max(cls: type[Reduction]):
    assert math.isnan(reduced(cls, 1.0, math.nan, 2.0).value(1.0))


@pytest.mark.parametrize("cls", [Min, Max, Last])
def test_a_sum_and_count_makes_no_sense_for_single_values(cls: type[Reduction]):
    with pytest.raises(ConfigError, match="single values"):
        cls().add_sum_count(1.0, 2.0)


@pytest.mark.parametrize("cls", [Mean, Sum, Min, Max])
@given(values=NUMBERS, cut=st.integers(0, 12))
def test_the_split_over_ranks_does_not_matter(cls: type[Reduction], values: list[int], cut: int):
    whole = reduced(cls, *map(float, values))
    left, right = reduced(cls, *map(float, values[:cut])), reduced(cls, *map(float, values[cut:]))
    left.merge(right)
    assert left.value(1.0) == whole.value(1.0)


@pytest.mark.parametrize("cls", [Mean, Sum, Min, Max, Last, Rate])
def test_the_state_travels_as_json(cls: type[Reduction]):
    reduction = reduced(cls, 4.0, 8.0)
    assert from_state(json.loads(json.dumps(reduction.state()))).value(3.0) == reduction.value(3.0)


def test_states_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="unknown reduction 'median'"):
        from_state({"kind": "median", "parts": [1.0]})
    with pytest.raises(ConfigError, match="2 parts, got 1"):
        from_state({"kind": "mean", "parts": [1.0]})
