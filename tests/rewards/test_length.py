"""Rewards that look at how long a response is."""

import pytest

from rlkit.errors import ConfigError
from rlkit.rewards import RewardFunction, overlong_penalty


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0), (500, -1.0)],
)
def test_overlong_penalty_by_hand(length: int, penalty: float) -> None:
    """DAPO eq. 13 with L_max = 100 and L_cache = 20: (80 - n) / 20 between 80 and 100."""
    reward = RewardFunction(overlong_penalty(100, 20))
    assert (reward.name, reward.needs) == ("overlong_penalty", {"response_length"})
    assert reward.score(["p"], ["r"], [{}], [length])[0] == pytest.approx(penalty)
    assert overlong_penalty(100, 20, weight=0.5)(length) == pytest.approx(penalty / 2)


def test_an_overlong_penalty_needs_a_buffer_within_the_length() -> None:
    for buffer in (0, -1, 101):
        with pytest.raises(ConfigError, match="1 <= buffer <= max_length"):
            overlong_penalty(100, buffer)
