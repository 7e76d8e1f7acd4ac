"""Rewards per token, and advantages from the rewards that follow a token."""

import torch
from torch import Tensor

from rlkit.algorithms.masked import masked_whiten
from rlkit.algorithms.shapes import require_rank, require_same_shape
from rlkit.errors import ConfigError

__all__ = ["gae", "overlong_penalty", "place_rewards", "reinforce_plus_plus_advantages", "remax_advantages"]


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
def reinforce_plus_plus_advantages(token_rewards: Tensor, mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Whitened reward-to-go (REINFORCE++, Hu 2025, arXiv:2501.03262).

        returns_t = r_t + gamma returns_{t+1},      A = (returns - mean) / std over all tokens of the minibatch

    where t + 1 is the next token inside the mask. The statistics are those of the rows given: call it on the whole
    minibatch. A minibatch of one token, or without spread, gets 0.

    Args:
        token_rewards: (B, T), the KL penalty already in them.
        mask: (B, T) true where the policy sampled a token.
        gamma: discount per token.

    Returns:
        advantages (B, T) and returns (B, T), both 0 outside the mask.
    """
    returns, _ = gae(token_rewards, torch.zeros_like(token_rewards), mask, gamma, 1.0)
    return masked_whiten(returns, mask), returns


@torch.no_grad()
def remax_advantages(token_rewards: Tensor, baselines: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Reward-to-go against the reward of the greedy response (ReMax, Li et al. 2023, arXiv:2310.10505).

        returns_t = r_t + returns_{t+1},      A_t = returns_t - b

    Args:
        token_rewards: (B, T).
        baselines: (B,) reward of the response to the same prompt that takes the likeliest token at each step.
        mask: (B, T) true where the policy sampled a token.

    Returns:
        advantages (B, T) and returns (B, T), both 0 outside the mask, not whitened.
    """
    require_rank(1, baselines=baselines)
    returns, _ = gae(token_rewards, torch.zeros_like(token_rewards), mask, 1.0, 1.0)
    require_same_shape(**{"one column of token_rewards": returns.new_zeros(len(returns)), "baselines": baselines})
    advantages = torch.where(mask.bool(), returns - baselines.to(returns)[:, None], torch.zeros_like(returns))
    return advantages, returns


@torch.no_grad()
def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft punishment of responses near the length limit, to be added to the reward (DAPO, Yu et al. 2025, eq. 13).

        0                                       where length <= max_length - buffer
        (max_length - buffer - length) / buffer     up to max_length, where it is -1
        -1                                      beyond

    Args:
        lengths: (B,) int64, sampled tokens of each response.
        max_length: the limit in tokens.
        buffer: width in tokens of the zone in which the punishment grows.

    Returns:
        (B,) float32, between -1 and 0.

    Raises:
        ConfigError: `buffer` is not within 1..max_length.
    """
    require_rank(1, lengths=lengths)
    if not 1 <= buffer <= max_length:
        raise ConfigError(f"the overlong buffer must be within 1..max_length ({max_length}), given {buffer!r}")
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0).float()
