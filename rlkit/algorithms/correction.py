"""Corrects for rollouts that were sampled by slightly another policy than the one whose log-probs the loss uses.

Engines that sample and engines that train compute the same weights with different kernels and precision, and rollouts
may be a version old. There are two remedies, which combine.

Importance weights multiply the token loss (Yao et al. 2025), from r = exp(log p_old - log p_rollout):

- "token": w is r of each token. Low variance, biased; "sequence": the product over the response, for all its tokens.
  Unbiased, high variance. The log of both is clamped to [-20, 20].
- `threshold` C truncates: min(w, C) (TIS, truncated importance sampling). `icepop` (lo, hi) replaces it: w, but 0
  outside the band (IcePop, Zhao et al. 2025).
- `normalise` divides by the mean weight of the minibatch, over tokens or over responses, so that the loss keeps its
  size. It needs the whole minibatch at once; all else is row by row.

Rejection takes tokens or whole responses out of the mask by an estimate of the divergence. With
d = log p_rollout - log p_old, "k1" is d, "k2" is d^2 / 2 and "k3" is exp(-d) - 1 + d.

- "token" drops tokens; "sequence-sum", "sequence-mean" and "sequence-max" drop responses by the sum, mean or maximum
  over their tokens.
- "k1" keeps what has a ratio exp(-k1) within `rejection_band` (lo, hi), a band of r like `icepop`; "k2" and "k3" keep
  what is at most `rejection_limit` nats.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from rlkit.algorithms.kl import kl_estimate
from rlkit.algorithms.policy_losses import LossMetrics
from rlkit.algorithms.shapes import require_rank, require_same_shape
from rlkit.errors import ConfigError

__all__ = ["Correction", "RejectionLevel", "WeightLevel", "rollout_correction"]

WeightLevel: TypeAlias = Literal["none", "token", "sequence"]
RejectionLevel: TypeAlias = Literal["none", "token", "sequence-sum", "sequence-mean", "sequence-max"]
Band: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Correction:
    """What `rollout_correction` gives.

    Attributes:
        weights: (B, T) constant factors of the token losses, 0 outside `mask`.
        mask: (B, T) bool, the mask that was given without what was rejected. The loss is aggregated over it.
        metrics: name -> (sum, count) over the mask that was given; over tokens unless said.

    Metrics always there:
        rollout_kl, rollout_k3: k1 and k3 estimates of KL(p_rollout || p_old), nats; k1 may be negative.
        ratio_chi2: r^2 - 1. sequence_ratio_chi2: the same of the product, over responses.
        old_log_ppl, rollout_log_ppl, log_ppl_gap: mean negative log-prob of a response, and its absolute difference,
            over responses. old_ppl, rollout_ppl, ppl_ratio: exponentials of the first two and of their difference.
    With weights:
        weight_mean, weight_square_mean: of w after its bound, before `normalise`. With these m and s the relative
            effective sample size is m^2 / s.
        weight_high_fraction, weight_low_fraction: w above and below the band (1 / threshold to threshold for TIS), over
            responses for "sequence". weight_zeroed_fraction: zeroed by IcePop.
    With rejection:
        rejected_token_fraction; rejected_response_fraction: responses of which a part or all is rejected.
        rejection_divergence: what is compared with the bounds, nats; over responses but for level "token".
    """

    weights: Tensor
    mask: Tensor
    metrics: LossMetrics


@torch.no_grad()
def rollout_correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    weights: str = "none",
    threshold: float | None = 2.0,
    icepop: Band | None = None,
    normalise: bool = False,
    rejection: str = "none",
    rejection_kind: str = "k1",
    rejection_band: Band | None = None,
    rejection_limit: float | None = None,
) -> Correction:
    """Importance weights and rejection for rollouts of another policy; the module says what each option does.

    Args:
        old_logprobs: (B, T) of the trained policy before the update, nats.
        rollout_logprobs: (B, T) as the sampler gave them, of the same distribution.
        mask: (B, T) true where the policy sampled a token.
        weights: "none", "token" or "sequence".
        threshold: upper bound of the weights, or None for no bound; without effect beside `icepop`.
        icepop: band (lo, hi) of the weights.
        normalise: divide the weights by their mean.
        rejection: "none", "token", "sequence-sum", "sequence-mean" or "sequence-max" (not with "k1").
        rejection_kind: "k1", "k2" or "k3".
        rejection_band: (lo, hi) ratios, for "k1".
        rejection_limit: nats, for "k2" and "k3".

    Returns:
        Correction, none of it differentiable.

    Raises:
        ConfigError: unknown names, or bounds that are missing, without effect or not in order.
    """
    _check(weights, threshold, icepop, rejection, rejection_kind, rejection_band, rejection_limit)
    require_rank(2, old_logprobs=old_logprobs)
    require_same_shape(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    kept = mask.bool()
    dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
    old, rollout = (
        torch.where(kept, x.to(dtype), x.new_zeros((), dtype=dtype)) for x in (old_logprobs, rollout_logprobs)
    )
    metrics = _gap(old, rollout, kept)
    factors = kept.to(dtype)
    if weights != "none":
        factors, more = _weights(old - rollout, kept, weights == "sequence", threshold, icepop, normalise)
        metrics |= more
    accepted = kept
    if rejection != "none":
        units = kept if rejection == "token" else kept.any(1, keepdim=True)
        divergence = torch.where(units, _divergence(old, rollout, kept, rejection, rejection_kind), 0.0)
        accepted = kept & _within(divergence, rejection_band, rejection_limit)
        lost = kept & ~accepted
        metrics |= {
            "rejection_divergence": (divergence.sum(), units.sum()),
            "rejected_token_fraction": (lost.sum(), kept.sum()),
            "rejected_response_fraction": (lost.any(1).sum(), kept.any(1).sum()),
        }
    return Correction(torch.where(accepted, factors, torch.zeros_like(factors)), accepted, metrics)


def _check(
    weights: str,
    threshold: float | None,
    icepop: Band | None,
    rejection: str,
    kind: str,
    band: Band | None,
    limit: float | None,
) -> None:
    for name, value, known in (
        ("weights", weights, get_args(WeightLevel)),
        ("rejection", rejection, get_args(RejectionLevel)),
        ("rejection_kind", kind, ("k1", "k2", "k3")),
    ):
        if value not in known:
            raise ConfigError(f"unknown {name} {value!r}; expected one of {', '.join(known)}")
    if threshold is not None and not threshold > 0:
        raise ConfigError(f"threshold must be above 0 or None for no truncation, given {threshold!r}")
    for name, edges in (("icepop", icepop), ("rejection_band", band)):
        if edges is not None and not 0 < edges[0] < edges[1]:
            raise ConfigError(f"{name} must be two ratios (lo, hi) with 0 < lo < hi, given {edges!r}")
    if rejection == "none":
        if band is not None or limit is not None:
            raise ConfigError("rejection_band and rejection_limit need a rejection level, given rejection='none'")
    elif kind == "k1":
        if band is None or limit is not None or rejection == "sequence-max":
            raise ConfigError(
                "rejection by 'k1' needs rejection_band (lo, hi), no rejection_limit, and a level other than "
                f"'sequence-max', given band {band!r}, limit {limit!r}, level {rejection!r}"
            )
    elif limit is None or not limit > 0 or band is not None:
        raise ConfigError(
            f"rejection by {kind!r} needs rejection_limit in nats (> 0) and no rejection_band, "
            f"given limit {limit!r}, band {band!r}"
        )


def _weights(
    log_ratio: Tensor, kept: Tensor, whole: bool, threshold: float | None, icepop: Band | None, normalise: bool
) -> tuple[Tensor, LossMetrics]:
    """Factors (B, T) and their metrics; `whole` responses share one weight."""
    units = kept.any(1, keepdim=True) if whole else kept
    exponent = log_ratio.sum(1, keepdim=True) if whole else log_ratio
    raw = torch.where(units, exponent.clamp(-20.0, 20.0).exp(), torch.zeros_like(exponent))
    infinity = float("inf")
    low, high = icepop or ((1 / threshold, threshold) if threshold else (0.0, infinity))
    above, below = units & (raw > high), units & (raw < low)
    used = torch.where(above | below, torch.zeros_like(raw), raw) if icepop else raw.clamp_max(high)
    factors = torch.where(kept, used.expand_as(kept), torch.zeros_like(log_ratio))
    tokens = kept.sum()
    metrics: LossMetrics = {
        "weight_mean": (factors.sum(), tokens),
        "weight_square_mean": (factors.square().sum(), tokens),
        "weight_high_fraction": (above.sum(), units.sum()),
        "weight_low_fraction": (below.sum(), units.sum()),
    }
    if icepop:
        metrics["weight_zeroed_fraction"] = ((kept & (above | below)).sum(), tokens)
    if normalise:
        mean = used.sum() / units.sum().clamp_min(1)
        factors = factors / torch.where(mean > 0, mean, torch.ones_like(mean))
    return factors, metrics


def _divergence(old: Tensor, rollout: Tensor, kept: Tensor, level: str, kind: str) -> Tensor:
    """(B, T) of the tokens or (B, 1) of the responses, columns being 0 outside the mask."""
    divergence = kl_estimate(rollout, old, kind)
    if level == "token":
        return divergence
    if level == "sequence-max":
        return divergence.masked_fill(~kept, -float("inf")).amax(1, keepdim=True)
    total = divergence.sum(1, keepdim=True)
    return total / kept.sum(1, keepdim=True).clamp_min(1) if level == "sequence-mean" else total


def _within(divergence: Tensor, band: Band | None, limit: float | None) -> Tensor:
    if band is not None:
        ratio = (-divergence).exp()
        return (ratio >= band[0]) & (ratio <= band[1])
    assert limit is not None
    return divergence <= limit


def _gap(old: Tensor, rollout: Tensor, kept: Tensor) -> LossMetrics:
    """How far the two policies are apart; columns are 0 outside the mask."""
    tokens, rows = kept.sum(), kept.any(1)
    responses, lengths = rows.sum(), kept.sum(1).clamp_min(1)
    log_ratio = (old - rollout).clamp(-20.0, 20.0)
    old_ppl, rollout_ppl = -old.sum(1) / lengths, -rollout.sum(1) / lengths
    gap = old_ppl - rollout_ppl

    def over(rows_numbers: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(rows, rows_numbers, torch.zeros_like(rows_numbers)).sum(), responses

    return {
        "rollout_kl": ((rollout - old).sum(), tokens),
        "rollout_k3": (kl_estimate(rollout, old, "k3").sum(), tokens),
        "ratio_chi2": (((2 * log_ratio).exp() - 1).sum(), tokens),
        "sequence_ratio_chi2": over((2 * (old - rollout).sum(1).clamp(-20.0, 20.0)).exp() - 1),
        "old_log_ppl": over(old_ppl),
        "rollout_log_ppl": over(rollout_ppl),
        "log_ppl_gap": over(gap.abs()),
        "old_ppl": over(old_ppl.exp()),
        "rollout_ppl": over(rollout_ppl.exp()),
        "ppl_ratio": over(gap.exp()),
    }
