"""Which policy loss the settings ask for, called with the settings it takes."""

from __future__ import annotations

from torch import Tensor

from rlkit.algorithms.gradient_losses import dppo_kl_loss, dppo_tv_loss, dro_loss, gpg_loss
from rlkit.algorithms.policy_losses import LossMetrics, ppo_clip_loss
from rlkit.algorithms.ratio_losses import cispo_loss, gmpo_loss, gspo_loss, sapo_loss
from rlkit.config import TrainerConfig


def policy_loss(
    config: TrainerConfig, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, LossMetrics]:
    """Token losses (B,T) and metrics of the loss that `config.policy_loss` names; arguments as for `ppo_clip_loss`."""
    given = (logprobs, old_logprobs, advantages, mask)
    low, high = config.clip_low, config.clip_high
    match config.policy_loss:
        case "ppo":
            return ppo_clip_loss(*given, low, high, config.dual_clip)
        case "gspo":
            return gspo_loss(*given, low, high)
        case "gmpo":
            return gmpo_loss(*given, low, high)
        case "cispo":
            return cispo_loss(*given, low, high)
        case "sapo":
            return sapo_loss(*given, config.sapo_tau_pos, config.sapo_tau_neg)
        case "dppo-tv":
            return dppo_tv_loss(*given, low, high, config.ratio_cap)
        case "dppo-kl":
            return dppo_kl_loss(*given, low, high, config.ratio_cap)
        case "dro":
            return dro_loss(*given, config.dro_beta)
        case "gpg":
            return gpg_loss(logprobs, advantages, mask)
