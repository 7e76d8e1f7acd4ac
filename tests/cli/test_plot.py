"""Curves drawn with characters, against pictures worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.cli.plot import bounds, braille, duration, number, resample, sparkline


def test_sparkline_of_a_ramp() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"


def test_sparkline_leaves_a_blank_where_there_is_no_number() -> None:
    assert sparkline([0, math.nan, 1], 8) == "▁ █"


def test_sparkline_of_a_flat_curve_stays_in_the_middle() -> None:
    assert sparkline([3, 3, 3], 8) == "▄▄▄"


def test_braille_of_a_rising_line_of_four_dots() -> None:
    # One character wide and high: two columns of four dots. The left dot is at the bottom (bit 0x40); the right column
    # goes from just above it (row 2) to the top (row 0): bits 0x20, 0x10, 0x08.
    assert braille([0, 1], 1, 1) == [chr(0x2800 + 0x40 + 0x20 + 0x10 + 0x08)]


def test_braille_puts_low_below_and_high_above() -> None:
    top, bottom = braille([0, 0, 0, 0, 1, 1, 1, 1], 4, 2)
    assert top[0] == top[1] == chr(0x2800)
    assert bottom[0] == bottom[1] == chr(0x2800 + 0x40 + 0x80)
    assert top[3] == chr(0x2800 + 0x01 + 0x08)
    assert bottom[3] == chr(0x2800)


def test_braille_leaves_a_gap_where_there_is_no_number() -> None:
    (line,) = braille([1, 1, math.nan, math.nan, 1, 1], 3, 1)
    assert [cell != chr(0x2800) for cell in line] == [True, False, True]


def test_resample_takes_means_of_equal_stretches() -> None:
    assert resample([1, 3, 5, 7], 2) == [2, 6]
    assert resample([1, math.nan, 5, 7], 2) == [1, 6]


def test_resample_draws_straight_lines_between_few_points() -> None:
    assert resample([0, 2], 5) == [0, 0.5, 1, 1.5, 2]
    assert resample([4], 5) == [4]
    assert resample([], 5) == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 30), st.integers(1, 5))
def test_drawing_keeps_its_size_and_its_ends(values: list[float], width: int, height: int) -> None:
    lines = braille(values, width, height)
    assert [len(line) for line in lines] == [width] * height
    drawn = resample(values, 2 * width)
    assert min(values) <= bounds(drawn)[0] + 1e-6
    assert bounds(drawn)[1] <= max(values) + 1e-6


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.42134567, "0.4213"),
        (-0.5, "-0.5"),
        (2e-5, "2e-05"),
        (18_812.0, "18.8k"),
        (2_500_000.0, "2.5M"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (45.2, "45s"), (200, "3m 20s"), (7500, "2h 05m")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
