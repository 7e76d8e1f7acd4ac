"""What a trainer is about: what of its live settings means something to it (`TrainerConfig.live_specs`)."""

from __future__ import annotations

from rlkit.config import TrainerConfig


def rollout_aspects(config: TrainerConfig, has_critic: bool) -> set[str]:
    """Aspects that learning from sampled responses has."""
    found = {"policy", "sampling"}
    if config.adaptive_sampling:
        found.add("adaptive sampling")
    if config.policy_loss not in ("sapo", "dro", "gpg"):
        found.add("clip")
    found |= {"dual clip"} if config.policy_loss == "ppo" else {config.policy_loss.split("-")[0]}
    if has_critic or config.advantage_estimator == "reinforce++":
        found.add("discount")
    if config.correction_weights != "none":
        found.add("correction")
    if config.rejection != "none":
        found.add("rejection by band" if config.rejection_kind == "k1" else "rejection by limit")
    return found
