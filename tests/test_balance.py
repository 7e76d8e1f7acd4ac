"""Balanced parts: by hand, against every possible split, and the promises that callers rely on."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.balance import balanced_partitions
from rlkit.errors import DataError


def _sums(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return sorted(sum(lengths[index] for index in part) for part in parts)


def test_the_example_of_the_differencing_method() -> None:
    # 8 7 6 5 4: 8-7=1, 6-5=1, 4-1=3, 3-1=2: sums 14 and 16, where the greedy rule ends at 13 and 17.
    assert _sums([8, 7, 6, 5, 4], balanced_partitions([8, 7, 6, 5, 4], 2)) == [14, 16]


def test_equal_sizes_hold_even_when_sums_suffer() -> None:
    lengths = [100, 1, 1, 1]
    assert balanced_partitions(lengths, 2) == [[0], [1, 2, 3]]
    assert sorted(map(len, balanced_partitions(lengths, 2, equal_size=True))) == [2, 2]


def test_one_part_and_as_many_parts_as_sequences() -> None:
    assert balanced_partitions([3, 1, 2], 1) == [[0, 1, 2]]
    assert balanced_partitions([3, 1, 2], 3) == [[0], [1], [2]]


def test_sequences_without_tokens_still_fill_every_part() -> None:
    assert [len(part) for part in balanced_partitions([0, 0, 0, 0], 4)] == [1, 1, 1, 1]
    assert all(balanced_partitions([5, 0, 0], 3))


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=24), k=st.integers(1, 6), equal_size=st.booleans())
def test_every_index_once_and_no_empty_part(lengths: list[int], k: int, equal_size: bool) -> None:
    k = min(k, len(lengths))
    lengths = lengths[: len(lengths) // k * k] if equal_size else lengths
    parts = balanced_partitions(lengths, k, equal_size)
    assert len(parts) == k
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert all(parts)
    assert parts == balanced_partitions(lengths, k, equal_size)
    if equal_size:
        assert {len(part) for part in parts} == {len(lengths) // k}
    assert max(_sums(lengths, parts)) - min(_sums(lengths, parts)) <= max(lengths, default=0) * (1 + equal_size)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=9))
def test_two_parts_are_close_to_the_best_split(lengths: list[int]) -> None:
    """The larger part is at most 7/6 of the best one's (Fischetti & Martello 1987)."""
    everything = sum(lengths)
    best = min(
        abs(everything - 2 * sum(chosen))
        for size in range(1, len(lengths))
        for chosen in itertools.combinations(lengths, size)
    )
    low, high = _sums(lengths, balanced_partitions(lengths, 2))
    assert best <= high - low
    assert 6 * high <= 7 * (everything + best) / 2


@pytest.mark.parametrize(
    ("lengths", "k", "equal_size", "message"),
    [
        ([1, 2], 3, False, "cannot make 3 non-empty parts of 2 sequences; expected 1 to 2 parts"),
        ([1, 2], 0, False, "cannot make 0 non-empty parts"),
        ([], 1, False, "cannot make 1 non-empty parts of 0 sequences"),
        ([1, 2, 3], 2, True, "cannot deal 3 sequences into 2 parts of equal size; expected a multiple of 2"),
        ([1, -2], 2, False, "lengths must be 0 or more, given -2"),
    ],
)
def test_bad_input_is_refused(lengths: list[int], k: int, equal_size: bool, message: str) -> None:
    with pytest.raises(DataError, match=message):
        balanced_partitions(lengths, k, equal_size)
