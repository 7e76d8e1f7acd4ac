import math

import numpy as np
import pytest

from rlkit.runs.curves import decimate, matches


@pytest.mark.parametrize(
    ("name", "patterns", "expected"),
    [
        ("reward/mean", ["reward/mean"], True),
        ("reward/mean", ["reward/*"], True),
        ("kl/per_token", ["kl"], True),
        ("train/kl", ["kl"], True),
        ("train/kl_loss", ["kl"], False),
        ("reward/mean", ["Reward/*"], False),
        ("reward/mean", [], False),
    ],
)
def test_matches(name: str, patterns: list[str], expected: bool) -> None:
    assert matches(name, patterns) is expected


def test_decimate_keeps_ends_peaks_and_gaps() -> None:
    steps = np.arange(10_000.0)
    values = np.sin(steps / 300)
    values[4_321], values[7_777] = 5.0, -5.0
    values[2_000:2_500] = math.nan
    kept_steps, kept = decimate(steps, values, 200)
    assert len(kept_steps) == len(kept) <= 200
    assert (kept_steps[0], kept_steps[-1]) == (0, 9_999)
    assert kept_steps[np.nanargmax(kept)] == 4_321
    assert kept_steps[np.nanargmin(kept)] == 7_777
    gap = (kept_steps >= 2_100) & (kept_steps < 2_400)
    assert gap.any()
    assert np.isnan(kept[gap]).all()
    assert np.all(np.diff(kept_steps) > 0)


def test_decimate_by_hand() -> None:
    steps = np.arange(8.0)
    values = np.array([0.0, 3.0, 1.0, 2.0, 9.0, 4.0, 5.0, 7.0])
    # limit 6: two buckets of four; (0, 3) and (4, 9) are their extremes, and the last point stays
    chosen, kept = decimate(steps, values, 6)
    assert chosen.tolist() == [0, 1, 4, 5, 7]
    assert kept.tolist() == [0.0, 3.0, 9.0, 4.0, 7.0]
    assert decimate(steps, values, 8)[0] is steps
    with pytest.raises(ValueError, match="at least 4"):
        decimate(steps, values, 3)
