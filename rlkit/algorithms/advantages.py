"""Rewards per token, and advantages from them."""

from typing import Literal

import torch
from torch import Tensor

from rlkit.algorithms.shapes import require_rank, require_same_shape
from rlkit.errors import ConfigError

__all__ = ["gae", "group_advantages", "place_rewards"]


@torch.no_grad()
def place_rewards(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Token rewards (B, T): the response's reward on its last sampled token, minus `kl_coef * kl` on every token.

        r_t = 1[t is the last token] R - kl_coef KL_t        (Ziegler et al. 2019; Ouyang et al. 2022)

    Args:
        rewards: (B,) reward of each response. A response without tokens receives none.
        mask: (B, T) true where the policy sampled a token.
        kl: (B, T) KL estimate per token, in nats.
        kl_coef: weight of the penalty.
    """
    require_rank(1, rewards=rewards)
    require_rank(2, mask=mask)
    kept = mask.bool()
    require_same_shape(**{"one column of mask": mask.new_zeros(len(mask)), "rewards": rewards})
    last = kept & (kept.flip(1).cumsum(1).flip(1) == 1)
    placed = torch.where(last, rewards[:, None], rewards.new_zeros(()))
    if kl is None:
        return placed
    require_same_shape(mask=mask, kl=kl)
    return placed - kl_coef * torch.where(kept, kl, torch.zeros_like(kl))


@torch.no_grad()
def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1},      returns_t = A_t + V_t

    where t + 1 is the next token inside the mask: positions outside it are stepped over. After the last token stands
    0 (the response ended) or `bootstrap` (it was cut off).

    Args:
        token_rewards: (B, T).
        values: (B, T), V_t is the estimate for the state *before* token t.
        mask: (B, T) true where the policy sampled a token.
        gamma: discount per token.
        lam: 0 gives one-step differences, 1 the discounted reward-to-go minus V.
        bootstrap: (B,) value of the state after the last token; 0 where the response ended. Left out: 0 everywhere.

    Returns:
        advantages (B, T) and returns (B, T), 0 outside the mask, not whitened.
    """
    require_rank(2, token_rewards=token_rewards, values=values, mask=mask)
    require_same_shape(token_rewards=token_rewards, values=values, mask=mask)
    kept = mask.bool()
    dtype = torch.promote_types(torch.promote_types(token_rewards.dtype, values.dtype), torch.float32)
    rewards, estimates = (torch.where(kept, x.to(dtype), x.new_zeros((), dtype=dtype)) for x in (token_rewards, values))
    advantage = rewards.new_zeros(len(rewards))
    next_value = advantage if bootstrap is None else bootstrap.to(rewards)
    require_same_shape(**{"one column of values": advantage, "bootstrap": next_value})
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - estimates[:, t]
        advantage = torch.where(kept[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(kept[:, t], estimates[:, t], next_value)
        advantages[:, t] = advantage
    advantages = torch.where(kept, advantages, torch.zeros_like(advantages))
    return advantages, advantages + estimates


@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    scale_by_std: bool = True,
    eps: float = 1e-6,
    singleton: Literal["zero", "raw"] = "zero",
    valid: Tensor | None = None,
) -> Tensor:
    """Reward of each response against the other responses to its prompt (GRPO, Shao et al. 2024, arXiv:2402.03300).

        A_i = (R_i - mean_g) / (std_g + eps),    std_g with Bessel's correction

    `scale_by_std=False` leaves the division out (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). Groups may differ in
    size and their rows may stand anywhere. Degenerate groups are always finite: no spread gives exactly 0, and a group
    of one gives 0 or, with `singleton="raw"`, is taken to have mean 0 and standard deviation 1.

    Args:
        rewards: (B,) floating point.
        groups: (B,) int64, equal for responses to one prompt.
        eps: added to the standard deviation.
        valid: (B,) bool; rows where it is false stay out of their group's statistics and get 0.

    Returns:
        (B,) advantage of each response.
    """
    require_rank(1, rewards=rewards, groups=groups)
    require_same_shape(rewards=rewards, groups=groups)
    if singleton not in ("zero", "raw"):
        raise ConfigError(f"singleton must be 'zero' or 'raw', given {singleton!r}")
    kept = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid.bool()
    require_same_shape(rewards=rewards, valid=kept)
    rewards = torch.where(kept, rewards, torch.zeros_like(rewards))
    ids, group = torch.unique(groups, return_inverse=True)

    def per_group(numbers: Tensor) -> Tensor:
        return numbers.new_zeros(len(ids)).index_add_(0, group, numbers)

    counts = per_group(kept.to(rewards.dtype))
    centred = torch.where(kept, rewards - (per_group(rewards) / counts.clamp_min(1))[group], torch.zeros_like(rewards))
    variance = per_group(centred.square()) / (counts - 1).clamp_min(1)
    advantages = centred / (variance.sqrt()[group] + eps) if scale_by_std else centred
    alone = rewards / (1 + eps) if scale_by_std else rewards
    flat = _no_spread(rewards, kept, group, len(ids))
    advantages = torch.where(flat[group], torch.zeros_like(rewards), advantages)
    if singleton == "raw":
        advantages = torch.where((counts == 1)[group] & kept, alone, advantages)
    return advantages


def _no_spread(rewards: Tensor, kept: Tensor, group: Tensor, count: int) -> Tensor:
    """(groups,) bool: all kept rewards of the group are the same number, so a rounded mean must not count as spread."""
    edges = []
    for reduction, limit in (("amin", float("inf")), ("amax", -float("inf"))):
        start = rewards.new_full((count,), limit)
        edges.append(start.scatter_reduce(0, group, torch.where(kept, rewards, start[group]), reduction))
    return edges[0] >= edges[1]
