"""Losses that hold the ratio to the policy that sampled: by sequence, by a capped weight, by a soft gate.

The first two lines of every docstring say what replaces PPO's clipped ratio; arguments and results are those of
`ppo_clip_loss`: token losses (B, T), 0 outside the mask, and metrics over the tokens inside it. All have

- approx_kl: log p_old - log p, the k1 estimate of KL(p_old || p), nats;
- ratio_mean: the ratio that the loss uses (of the response for `gspo_loss` and `gmpo_loss`);
- policy_loss: the token loss;
- clip_fraction, where something is clipped: each docstring says what it counts.
"""

from typing import Final

import torch
from torch import Tensor

from rlkit.algorithms.aggregation import AggregationMode
from rlkit.algorithms.masked import masked_mean
from rlkit.algorithms.policy_losses import LossMetrics
from rlkit.algorithms.ratios import Tokens, require_bounds, require_positive

__all__ = ["RESPONSE_AGGREGATION", "cispo_loss", "gmpo_loss", "gspo_loss", "sapo_loss"]

RESPONSE_AGGREGATION: Final[AggregationMode] = "seq-mean-token-mean"
"""Losses of whole responses (`gspo_loss`, `gmpo_loss`) are the papers' only when they are aggregated this way."""


def gspo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, LossMetrics]:
    """PPO's clipped loss with one ratio for the whole response (GSPO-token, Zheng et al. 2025, arXiv:2507.18071).

        s = exp(mean over the response's tokens of log p - log p_old)
        s_t = constant(s) p_t / constant(p_t)
        loss = max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high))

    s_t has the value of s and the gradient of the token's own log-prob, so tokens may have advantages of their own.
    With one advantage per response, aggregated as `RESPONSE_AGGREGATION`, value and gradient are those of GSPO.

    Args:
        logprobs, old_logprobs, advantages, mask: (B, T), as for `ppo_clip_loss`.
        clip_low, clip_high: bounds of the response's ratio; the paper uses 3e-4 and 4e-4.

    Returns:
        token_loss (B, T) and metrics; clip_fraction counts tokens whose clipped term was the larger one.

    Raises:
        ConfigError: a bound below 0.
    """
    require_bounds(clip_low, clip_high)
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask)
    lengths = tokens.kept.sum(1, keepdim=True).clamp_min(1)
    response = tokens.only_kept(tokens.log_ratio.detach()).sum(1, keepdim=True) / lengths
    ratio = (tokens.logprobs - tokens.logprobs.detach() + response).exp()
    plain, clipped = -tokens.gain * ratio, -tokens.gain * ratio.clamp(1 - clip_low, 1 + clip_high)
    token_loss = tokens.only_kept(torch.maximum(plain, clipped))
    return token_loss, tokens.metrics(token_loss, ratio, clip_fraction=clipped > plain)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, LossMetrics]:
    """The ratio as a capped, constant weight of the policy gradient (CISPO, MiniMax 2025, arXiv:2506.13585).

        loss = -A constant(clip(ratio, 1 - clip_low, 1 + clip_high)) log p

    Every token keeps a gradient, of bounded size. The value of the loss means little, its gradient is what counts.

    Args:
        logprobs, old_logprobs, advantages, mask: (B, T), as for `ppo_clip_loss`.
        clip_low, clip_high: bounds of the weight; a `clip_low` of 1 or more leaves it unbounded from below.

    Returns:
        token_loss (B, T) and metrics; clip_fraction counts tokens whose weight was capped.

    Raises:
        ConfigError: a bound below 0.
    """
    require_bounds(clip_low, clip_high)
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask)
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    token_loss = tokens.only_kept(-tokens.gain * weight * tokens.logprobs)
    return token_loss, tokens.metrics(token_loss, clip_fraction=weight != ratio)


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, tau_pos: float, tau_neg: float
) -> tuple[Tensor, LossMetrics]:
    """A smooth gate on the ratio instead of a clip (SAPO, Gao et al. 2025, arXiv:2511.20347).

        loss = -A 4 / tau sigmoid(tau (ratio - 1)),    tau = tau_pos where A > 0, else tau_neg

    Its gradient is the policy gradient times ratio 4 s (1 - s) with s = sigmoid(tau (ratio - 1)), which is 1 at ratio 1
    and fades on both sides, faster for a larger tau.

    Args:
        logprobs, old_logprobs, advantages, mask: (B, T), as for `ppo_clip_loss`.
        tau_pos, tau_neg: above 0; the paper uses 1.0 and 1.05.

    Returns:
        token_loss (B, T) and metrics; nothing is clipped: gate_mean is the mean of 4 s (1 - s), 1 when all pass.

    Raises:
        ConfigError: a temperature that is not above 0.
    """
    require_positive(tau_pos=tau_pos, tau_neg=tau_neg)
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask)
    tau = torch.where(tokens.gain > 0, tokens.gain.new_tensor(tau_pos), tokens.gain.new_tensor(tau_neg))
    gate = torch.sigmoid(tau * (tokens.ratio - 1))
    token_loss = tokens.only_kept(-tokens.gain * gate * 4 / tau)
    return token_loss, tokens.metrics(token_loss, gate_mean=4 * gate * (1 - gate))


def gmpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, LossMetrics]:
    """The geometric mean of the clipped token ratios (GMPO, Zhao et al. 2025, arXiv:2507.20673).

        l_t = the smaller of A l and A clamp(l, -clip_low, clip_high), over A;    l = log p - log p_old
        loss of the response = -A exp(mean of l_t over its tokens)

    One number per response, written on each of its tokens: aggregate as `RESPONSE_AGGREGATION`. A response whose
    tokens have different advantages takes their mean.

    Args:
        logprobs, old_logprobs, advantages, mask: (B, T), as for `ppo_clip_loss`.
        clip_low, clip_high: bounds of the *log*-ratio; the paper uses 0.4 for both, ratios of 0.67 to 1.49.

    Returns:
        token_loss (B, T) and metrics: clip_fraction counts tokens held at a bound, which give no gradient;
        outside_positive_fraction and outside_negative_fraction count tokens with a log-ratio out of bounds and a
        positive or negative advantage, whether the bound held them or not.

    Raises:
        ConfigError: a bound below 0.
    """
    require_bounds(clip_low, clip_high)
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask)
    bounded = tokens.log_ratio.detach().clamp(-clip_low, clip_high)
    outside = bounded != tokens.log_ratio
    held = tokens.gain * tokens.log_ratio > tokens.gain * bounded
    ratio = masked_mean(torch.where(held, bounded, tokens.log_ratio), tokens.kept, dim=1).exp()
    response_loss = -masked_mean(tokens.gain, tokens.kept, dim=1) * ratio
    token_loss = tokens.only_kept(response_loss[:, None].expand_as(tokens.kept))
    return token_loss, tokens.metrics(
        token_loss,
        ratio[:, None].expand_as(tokens.kept),
        clip_fraction=held,
        outside_positive_fraction=outside & (tokens.gain > 0),
        outside_negative_fraction=outside & (tokens.gain < 0),
    )
