"""Losses that move the policy."""

from typing import TypeAlias

import torch
from torch import Tensor

from rlkit.algorithms.shapes import require_rank, require_same_shape
from rlkit.errors import ConfigError

__all__ = ["LossMetrics", "ppo_clip_loss"]

LossMetrics: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""Name -> (sum, count) over tokens, both 0-d and detached; add sums and counts over micro-batches, then divide."""


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Clipped surrogate loss of PPO per token (Schulman et al. 2017, arXiv:1707.06347).

        ratio = exp(log p - log p_old)
        loss = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))

    With `dual_clip` c the loss of tokens with A < 0 is at most -A c (Ye et al. 2020, arXiv:1912.09729). A `clip_high`
    above `clip_low` is DAPO's clip-higher (Yu et al. 2025). The log-ratio is clamped to [-20, 20].

    Args:
        logprobs: (B, T) of the policy being trained; differentiable.
        old_logprobs: (B, T) of the policy before the update, of the same distribution.
        advantages: (B, T), constants.
        mask: (B, T) true where the policy sampled a token.
        clip_low, clip_high: how far the ratio may fall below and rise above 1 and still gain.
        dual_clip: c > 1, or None for no dual clip.

    Returns:
        token_loss (B, T), 0 outside the mask, and metrics over tokens inside it:
        clip_fraction: the clipped term was the larger one, so the token gave no gradient (dual clip not counted);
        ratio_outside_fraction: the ratio was out of bounds, whichever term counted;
        dual_clip_fraction: the dual clip bounded the loss;
        approx_kl: log p_old - log p, the k1 estimate of KL(p_old || p), nats;
        ratio_mean: the ratio;
        policy_loss: the token loss.

    Raises:
        ConfigError: `dual_clip` of 1 or less.
    """
    require_rank(2, logprobs=logprobs)
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip must be above 1 or None, given {dual_clip!r}")
    kept = mask.bool()
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    gain = torch.where(kept, advantages.detach(), zero)
    log_ratio = torch.where(kept, logprobs - old_logprobs.detach(), zero).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    low, high = 1 - clip_low, 1 + clip_high
    plain, clipped = -gain * ratio, -gain * ratio.clamp(low, high)
    loss = torch.maximum(plain, clipped)
    bounded = torch.zeros_like(kept)
    if dual_clip is not None:
        bound = -gain * dual_clip
        bounded = (gain < 0) & (loss > bound)
        loss = torch.where(gain < 0, torch.minimum(loss, bound), loss)
    token_loss = torch.where(kept, loss, zero)
    with torch.no_grad():
        count = kept.sum()
        metrics: LossMetrics = {
            "clip_fraction": (((clipped > plain) & kept).sum(), count),
            "ratio_outside_fraction": ((((ratio < low) | (ratio > high)) & kept).sum(), count),
            "dual_clip_fraction": ((bounded & kept).sum(), count),
            "approx_kl": (-log_ratio.sum(), count),
            "ratio_mean": (torch.where(kept, ratio, zero).sum(), count),
            "policy_loss": (token_loss.sum(), count),
        }
        metrics = {name: (total.detach(), number) for name, (total, number) in metrics.items()}
    return token_loss, metrics
