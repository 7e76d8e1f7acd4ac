"""Rewards that look at how long a response is."""

from dataclasses import dataclass

from rlkit.errors import ConfigError

__all__ = ["OverlongPenalty", "overlong_penalty"]


@dataclass(frozen=True)
class OverlongPenalty:
    """The reward function that `overlong_penalty` returns; its arguments are checked there."""

    max_length: int
    buffer: int
    weight: float
    __name__ = "overlong_penalty"

    def __call__(self, response_length: int) -> float:
        """The penalty of a response of so many tokens, between -weight and 0."""
        over = response_length - (self.max_length - self.buffer)
        return -self.weight * min(max(over / self.buffer, 0.0), 1.0)


def overlong_penalty(max_length: int, buffer: int, weight: float = 1.0) -> OverlongPenalty:
    """Soft punishment of responses that come near the length limit (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13).

        R(n) = 0                                   n <= max_length - buffer
               ((max_length - buffer) - n) / buffer    in between
               -1                                  n > max_length

    Args:
        max_length: tokens at which the punishment is whole; `max_new_tokens` or a little less.
        buffer: tokens before `max_length` over which it grows, 1..max_length.
        weight: factor on the punishment.

    Returns:
        A reward function of `response_length` (tokens).

    Raises:
        ConfigError: the buffer is not within 1..max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ConfigError(f"overlong_penalty needs 1 <= buffer <= max_length, given {buffer=} and {max_length=}")
    return OverlongPenalty(max_length, buffer, float(weight))
