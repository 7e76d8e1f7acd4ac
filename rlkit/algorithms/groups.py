"""Statistics of the responses to one prompt, with one rule for groups that have none."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from rlkit.algorithms.shapes import require_rank, require_same_shape
from rlkit.errors import ConfigError

__all__ = ["Groups", "Singleton"]

Singleton: TypeAlias = Literal["zero", "raw"]
"""What a response without siblings gets: 0, or its own reward as if the group's mean were 0."""


@dataclass(frozen=True)
class Groups:
    """Rewards of B responses in N groups. Groups may differ in size and their rows may stand anywhere.

    Attributes:
        rewards: (B,) with 0 in the rows that stay out; float32 if they were given in half precision.
        kept: (B,) bool, rows that count.
        group: (B,) int64, index of the row's group in 0..N-1, in the order of the group ids.
        counts: (N,) rows that count, of the dtype of the rewards.
        centred: (B,) reward minus the mean of its group, exactly 0 where the group has no spread or the row is out.
        spread: (N,) bool, false where all rewards of the group are the same number (groups of one among them).
    """

    rewards: Tensor
    kept: Tensor
    group: Tensor
    counts: Tensor
    centred: Tensor
    spread: Tensor

    @staticmethod
    def of(rewards: Tensor, groups: Tensor, valid: Tensor | None = None) -> "Groups":
        """Args as for `group_advantages`."""
        require_rank(1, rewards=rewards, groups=groups)
        require_same_shape(rewards=rewards, groups=groups)
        kept = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid.bool()
        require_same_shape(rewards=rewards, valid=kept)
        rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
        rewards = torch.where(kept, rewards, torch.zeros_like(rewards))
        ids, group = torch.unique(groups, return_inverse=True)
        counts = rewards.new_zeros(len(ids)).index_add_(0, group, kept.to(rewards.dtype))
        means = rewards.new_zeros(len(ids)).index_add_(0, group, rewards) / counts.clamp_min(1)
        low, high = (_extremes(rewards, kept, group, len(ids), name) for name in ("amin", "amax"))
        spread = ~(low >= high)  # a rounded mean must not count as spread, and a NaN must not hide
        centred = torch.where(kept & spread[group], rewards - means[group], torch.zeros_like(rewards))
        return Groups(rewards, kept, group, counts, centred, spread)

    def total(self, numbers: Tensor) -> Tensor:
        """(N,) sums of numbers (B,) within each group."""
        return numbers.new_zeros(len(self.counts)).index_add_(0, self.group, numbers)

    def std(self) -> Tensor:
        """(N,) standard deviation with Bessel's correction; 0 without spread."""
        return (self.total(self.centred.square()) / (self.counts - 1).clamp_min(1)).sqrt()

    def extreme(self, which: Literal["amin", "amax"], rows: Tensor | None = None) -> Tensor:
        """(N,) smallest or largest reward of each group, of those rows (B,) bool; +-inf for a group without any."""
        return _extremes(self.rewards, self.kept if rows is None else rows, self.group, len(self.counts), which)

    def with_singletons(self, advantages: Tensor, singleton: Singleton, alone: Tensor) -> Tensor:
        """Advantages (B,) with `alone` (B,) for responses without siblings when `singleton` is "raw".

        Raises:
            ConfigError: `singleton` is neither "zero" nor "raw".
        """
        if singleton not in get_args(Singleton):
            raise ConfigError(f"singleton must be 'zero' or 'raw', given {singleton!r}")
        if singleton == "zero":
            return advantages
        return torch.where((self.counts == 1)[self.group] & self.kept, alone, advantages)


def _extremes(rewards: Tensor, rows: Tensor, group: Tensor, count: int, which: str) -> Tensor:
    start = rewards.new_full((count,), float("inf") if which == "amin" else -float("inf"))
    return start.scatter_reduce(0, group, torch.where(rows, rewards, start[group]), which)
