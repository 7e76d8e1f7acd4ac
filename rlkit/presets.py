"""Settings of published algorithms, to be spread into a trainer's configuration.

    GRPOTrainer(actor, score, config={**presets.DAPO, "batch_size": 64, "group_size": 16})

Each holds what the paper changes against `GRPOTrainer`'s own defaults, and nothing that depends on model or task
(learning rates, batch sizes, lengths). PPO and plain GRPO are the defaults of their trainers.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

__all__ = [
    "CISPO",
    "DAPO",
    "DPPO",
    "DR_GRPO",
    "GDPO",
    "GMPO",
    "GPG",
    "GSPO",
    "PASS_AT_K",
    "REINFORCE_PP",
    "REINFORCE_PP_BASELINE",
    "REMAX",
    "RLOO",
    "SAPO",
]

Preset = Mapping[str, Any]


def _preset(**settings: Any) -> Preset:
    return MappingProxyType(settings)


DR_GRPO: Final = _preset(scale_by_std=False, loss_aggregation="seq-mean-token-sum-norm")
"""GRPO without its length and difficulty biases (Liu et al. 2025, arXiv:2503.20783)."""

DAPO: Final = _preset(
    clip_low=0.2, clip_high=0.28, loss_aggregation="token-mean", dynamic_sampling=True, mask_truncated=True
)
"""Clip-higher, token-level loss, dynamic sampling, overlong filtering (Yu et al. 2025, arXiv:2503.14476).

Its soft overlong punishment is a reward term: `rlkit.rewards.overlong_penalty`.
"""

RLOO: Final = _preset(
    advantage_estimator="rloo", loss_aggregation="seq-mean-token-sum", kl_placement="reward", kl_estimator="k1"
)
"""REINFORCE with the mean of the other responses as baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

REINFORCE_PP: Final = _preset(advantage_estimator="reinforce++", group_size=1, kl_placement="reward", kl_estimator="k1")
"""REINFORCE with PPO's clip, the KL in the reward, and advantages normalised over the batch (Hu 2025,
arXiv:2501.03262)."""

REINFORCE_PP_BASELINE: Final = _preset(advantage_estimator="reinforce++-baseline", kl_estimator="k2")
"""REINFORCE++ with the group's mean as baseline (Hu 2025)."""

REMAX: Final = _preset(advantage_estimator="remax", group_size=1, kl_placement="reward", kl_estimator="k1")
"""The reward of the greedy response as baseline (Li et al. 2023, arXiv:2310.10505)."""

GPG: Final = _preset(advantage_estimator="gpg", policy_loss="gpg")
"""Group policy gradient without ratio or clip (Chu et al. 2025, arXiv:2504.02546)."""

GSPO: Final = _preset(policy_loss="gspo", clip_low=3e-4, clip_high=4e-4, loss_aggregation="seq-mean-token-mean")
"""Ratios of whole sequences (Zheng et al. 2025, arXiv:2507.18071)."""

GMPO: Final = _preset(policy_loss="gmpo", clip_low=0.33, clip_high=0.49, loss_aggregation="seq-mean-token-mean")
"""Geometric mean of a response's ratios (Zhao et al. 2025, arXiv:2507.20673); the clip is [exp(-0.4), exp(0.4)]."""

CISPO: Final = _preset(policy_loss="cispo", clip_low=1.0, clip_high=0.28, loss_aggregation="token-mean")
"""Clipped importance weights that never cut a gradient (MiniMax 2025, arXiv:2506.13585)."""

SAPO: Final = _preset(policy_loss="sapo", loss_aggregation="seq-mean-token-mean")
"""Soft gates in the place of the clip (Gao et al. 2025, arXiv:2511.20347)."""

DPPO: Final = _preset(policy_loss="dppo-tv", clip_low=0.2, clip_high=0.2)
"""Trust region on the divergence of a token's probability in the place of its ratio."""

PASS_AT_K: Final = _preset(advantage_estimator="pass@k")
"""Advantages for the best of a group."""

GDPO: Final = _preset(advantage_estimator="gdpo", reward_normalization={"*": "group"})
"""Several rewards, each normalised within its group before they are mixed (Liu et al. 2026, arXiv:2601.05242)."""
