"""Losses in the form of the plain policy gradient, -A w log p with a constant weight w.

Their value means little: it moves with the log-probs themselves. Their gradient is what counts. Arguments, results and
metrics are as in `rlkit.algorithms.ratio_losses`.
"""

import torch
from torch import Tensor

from rlkit.algorithms.policy_losses import LossMetrics
from rlkit.algorithms.ratios import Tokens, require_bounds, require_positive
from rlkit.errors import ConfigError

__all__ = ["dppo_kl_loss", "dppo_tv_loss", "dro_loss", "gpg_loss"]


def gpg_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, LossMetrics]:
    """The policy gradient itself, -A log p (GPG, Chu et al. 2025, arXiv:2504.02546; Williams 1992).

    It knows no older policy, so it fits one update per batch of rollouts.

    Args:
        logprobs: (B, T) of the policy being trained; differentiable.
        advantages: (B, T), constants.
        mask: (B, T) true where the policy sampled a token.

    Returns:
        token_loss (B, T), 0 outside the mask, and its metric policy_loss.
    """
    tokens = Tokens.of(logprobs, logprobs, advantages, mask)
    token_loss = tokens.only_kept(-tokens.gain * tokens.logprobs)
    return token_loss, {"policy_loss": tokens.metrics(token_loss)["policy_loss"]}


def dro_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, beta: float
) -> tuple[Tensor, LossMetrics]:
    """The policy gradient with a squared log-ratio that pulls back (DRO, Richemond et al. 2024, arXiv:2405.19107).

        loss = -A log p + beta / 2 (log p - log p_old)^2

    No ratio, so no importance weights: it is made for rollouts that another policy sampled.

    Args:
        logprobs, old_logprobs, advantages, mask: (B, T), as for `ppo_clip_loss`.
        beta: strength of the pull, 0 or more.

    Returns:
        token_loss (B, T) and metrics; nothing is clipped.

    Raises:
        ConfigError: `beta` below 0.
    """
    if not beta >= 0:
        raise ConfigError(f"beta must be 0 or more, given {beta!r}")
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask)
    distance = tokens.logprobs - tokens.old_logprobs  # not clamped: the further away, the harder it pulls
    token_loss = tokens.only_kept(-tokens.gain * tokens.logprobs + beta / 2 * distance.square())
    return token_loss, tokens.metrics(token_loss)


def dppo_tv_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    c: float = 20.0,
) -> tuple[Tensor, LossMetrics]:
    """Tokens that moved too far in probability give no gradient (DPPO, Qi et al. 2026, arXiv:2602.04879).

        loss = -A constant(min(ratio, c)) log p,
        and 0 where A > 0 and p - p_old > clip_high, or A < 0 and p_old - p > clip_low

    |p - p_old| is the total variation between the policies if all other tokens count as one. A rare token may thus
    change its ratio a lot, a frequent one may not.

    Args:
        logprobs, old_logprobs, advantages, mask: (B, T), as for `ppo_clip_loss`.
        clip_low, clip_high: how far the probability of a sampled token may fall and rise.
        c: the largest weight of a token.

    Returns:
        token_loss (B, T) and metrics; clip_fraction counts tokens that moved too far.

    Raises:
        ConfigError: a bound below 0, or `c` that is not above 0.
    """
    require_bounds(clip_low, clip_high)
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask)
    change = tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()
    gone = ((tokens.gain > 0) & (change > clip_high)) | ((tokens.gain < 0) & (change < -clip_low))
    return _without(gone, tokens, c)


def dppo_kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    c: float = 20.0,
) -> tuple[Tensor, LossMetrics]:
    """`dppo_tv_loss` with the KL divergence, all other tokens counted as one (DPPO, Qi et al. 2026, arXiv:2602.04879).

        D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))
        loss = -A constant(min(ratio, c)) log p,
        and 0 where A > 0, p > p_old and D > clip_high, or A < 0, p < p_old and D > clip_low

    Args:
        logprobs, old_logprobs, advantages, mask: (B, T), as for `ppo_clip_loss`.
        clip_low, clip_high: the largest divergence, in nats, when the probability falls and when it rises.
        c: the largest weight of a token.

    Returns:
        token_loss (B, T) and metrics; clip_fraction counts tokens that moved too far.

    Raises:
        ConfigError: a bound below 0, or `c` that is not above 0.
    """
    require_bounds(clip_low, clip_high)
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask)
    log_ratio = tokens.log_ratio.detach()
    least = torch.finfo(log_ratio.dtype).tiny
    rest, old_rest = (-torch.expm1(x.detach()).clamp_max(-least) for x in (tokens.logprobs, tokens.old_logprobs))
    divergence = -tokens.old_logprobs.exp() * log_ratio + old_rest * (old_rest / rest).log()
    rises, falls = (tokens.gain > 0) & (log_ratio > 0), (tokens.gain < 0) & (log_ratio < 0)
    gone = (rises & (divergence > clip_high)) | (falls & (divergence > clip_low))
    return _without(gone, tokens, c)


def _without(gone: Tensor, tokens: Tokens, c: float) -> tuple[Tensor, LossMetrics]:
    require_positive(c=c)
    weight = torch.where(gone, torch.zeros_like(tokens.ratio), tokens.ratio).detach().clamp_max(c)
    token_loss = tokens.only_kept(-tokens.gain * weight * tokens.logprobs)
    return token_loss, tokens.metrics(token_loss, clip_fraction=gone)
