"""What the losses that compare the policy with the one that sampled have in common."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit.algorithms.policy_losses import LossMetrics
from rlkit.algorithms.shapes import require_rank, require_same_shape
from rlkit.errors import ConfigError

__all__ = ["Tokens", "require_bounds", "require_positive"]


@dataclass(frozen=True)
class Tokens:
    """Columns (B, T) of a policy loss, with 0 outside the mask.

    Attributes:
        kept: bool, true where the policy sampled a token.
        logprobs: of the policy being trained, differentiable.
        old_logprobs: of the policy before the update, constant.
        gain: the advantage, constant.
        log_ratio: log p - log p_old clamped to [-20, 20], differentiable.
        ratio: its exponential.
    """

    kept: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    gain: Tensor
    log_ratio: Tensor
    ratio: Tensor

    @staticmethod
    def of(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> "Tokens":
        """Args as for `ppo_clip_loss`.

        Raises:
            DataError: not two dimensions, or shapes that differ.
        """
        require_rank(2, logprobs=logprobs)
        require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
        kept = mask.bool()
        zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
        current = torch.where(kept, logprobs, zero)
        gain = torch.where(kept, advantages.detach(), zero)
        old = torch.where(kept, old_logprobs.detach(), zero)
        log_ratio = (current - old).clamp(-20.0, 20.0)
        return Tokens(kept, current, old, gain, log_ratio, log_ratio.exp())

    def only_kept(self, numbers: Tensor) -> Tensor:
        """Numbers (B, T) with 0 outside the mask."""
        return torch.where(self.kept, numbers, torch.zeros((), dtype=numbers.dtype, device=numbers.device))

    @torch.no_grad()
    def metrics(self, token_loss: Tensor, ratio: Tensor | None = None, **means: Tensor) -> LossMetrics:
        """The metrics that all of these losses have, and `means` (B, T) by name, as sums and counts over tokens.

        Args:
            token_loss: (B, T), 0 outside the mask.
            ratio: (B, T) the ratio that the loss uses; that of the tokens when left out.
            means: numbers or bool per token.
        """
        columns = {
            "approx_kl": -self.log_ratio,
            "ratio_mean": self.ratio if ratio is None else ratio,
            "policy_loss": token_loss,
            **means,
        }
        count = self.kept.sum()
        dtype = self.logprobs.dtype
        return {name: (self.only_kept(column.detach().to(dtype)).sum(), count) for name, column in columns.items()}


def require_bounds(clip_low: float, clip_high: float) -> None:
    """Raises ConfigError unless both are 0 or more."""
    if not (clip_low >= 0 and clip_high >= 0):
        raise ConfigError(f"clip_low and clip_high must be 0 or more, given {clip_low!r} and {clip_high!r}")


def require_positive(**numbers: float) -> None:
    """Raises ConfigError unless every number is above 0."""
    for name, number in numbers.items():
        if not number > 0:
            raise ConfigError(f"{name} must be above 0, given {number!r}")
