"""Losses that move the critic."""

import torch
from torch import Tensor

from rlkit.algorithms.policy_losses import LossMetrics
from rlkit.algorithms.shapes import require_rank, require_same_shape
from rlkit.errors import ConfigError

__all__ = ["clipped_value_loss"]


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, LossMetrics]:
    """Squared error of the critic per token, with the value held near the one before the update.

        v_clip = V_old + clamp(V - V_old, -clip, clip)
        loss = max((V - R)^2, (v_clip - R)^2) / 2

    (The value clipping of OpenAI's PPO2 code, described in Engstrom et al. 2020, arXiv:2005.12729.)

    Args:
        values: (B, T) of the critic being trained; differentiable.
        old_values: (B, T) before the update.
        returns: (B, T) targets, constants.
        mask: (B, T) true where the policy sampled a token.
        clip: how far a value may move before its gain stops counting, in units of reward; None leaves it off.

    Returns:
        token_loss (B, T), 0 outside the mask, and metrics over tokens inside it:
        value_clip_fraction: the clipped term was the larger one, so the token gave no gradient;
        value_outside_fraction: the value had moved by more than `clip`, whichever term counted;
        value_loss: the token loss.

    Raises:
        ConfigError: `clip` is not positive.
    """
    require_rank(2, values=values)
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    if clip is not None and not clip > 0:
        raise ConfigError(f"the value clip must be above 0 or None, given {clip!r}")
    kept = mask.bool()
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    old, target = (torch.where(kept, x.detach(), zero) for x in (old_values, returns))
    current = torch.where(kept, values, zero)
    loss = (current - target).square()
    limiting = outside = torch.zeros_like(kept)
    if clip is not None:
        held = torch.clamp(current, old - clip, old + clip)
        clipped_loss = (held - target).square()
        limiting, outside = clipped_loss > loss, (current - old).abs() > clip
        loss = torch.maximum(loss, clipped_loss)
    token_loss = torch.where(kept, loss / 2, zero)
    count = kept.sum()
    metrics: LossMetrics = {
        "value_clip_fraction": ((limiting & kept).sum(), count),
        "value_outside_fraction": ((outside & kept).sum(), count),
        "value_loss": (token_loss.detach().sum(), count),
    }
    return token_loss, metrics
