import math

from rlkit_widgets.series import KEPT_LIMIT, PAGE_LIMIT, Series


def filled(values: list[float]) -> Series:
    series = Series()
    for step, value in enumerate(values):
        series.append(step, value)
    return series


def test_points_come_back_in_order_settled_or_not() -> None:
    series = filled([3.0, 1.0, 2.0])
    assert [list(part) for part in series.points()] == [[0, 1, 2], [3.0, 1.0, 2.0]]
    assert [list(part) for part in series.take_fresh(10)] == [[0, 1, 2], [3.0, 1.0, 2.0]]
    assert [list(part) for part in series.take_fresh(10)] == [[], []]
    series.append(3, 5.0)
    assert [list(part) for part in series.points()] == [[0, 1, 2, 3], [3.0, 1.0, 2.0, 5.0]]


def test_a_step_seen_before_replaces_it_and_all_after_it() -> None:
    series = filled([0.0, 1.0, 2.0, 3.0])
    series.take_fresh(10)
    series.append(4, 4.0)
    series.append(2, 20.0)
    assert [list(part) for part in series.points()] == [[0, 1, 2], [0.0, 1.0, 20.0]]


def test_memory_and_page_stay_bounded_and_no_peak_is_lost() -> None:
    values = [math.sin(step / 50) for step in range(60_000)]
    values[31_234] = 9.0
    values[45_001] = -9.0
    series = Series()
    for step, value in enumerate(values):
        series.append(step, value)
        if step % 10 == 0:
            series.take_fresh(200)
        assert len(series) <= KEPT_LIMIT + 10
    steps, shown = series.points()
    assert len(steps) == len(shown) <= PAGE_LIMIT
    assert max(shown) == 9.0
    assert min(shown) == -9.0
    assert (steps[0], steps[-1]) == (0, 59_999)
    assert list(steps) == sorted(set(steps))


def test_fresh_points_stay_bounded_while_nobody_takes_them() -> None:
    series = filled([float(step % 7) for step in range(40_000)])
    assert len(series) <= KEPT_LIMIT + 1
