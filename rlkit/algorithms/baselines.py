"""Advantages of responses against the other responses to their prompt."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from rlkit.algorithms.groups import Groups, Singleton
from rlkit.algorithms.masked import masked_whiten
from rlkit.algorithms.shapes import require_rank, require_same_shape
from rlkit.errors import ConfigError

__all__ = [
    "gdpo_advantages",
    "gpg_advantages",
    "group_advantages",
    "passk_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "rloo_advantages",
]


@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    scale_by_std: bool = True,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    valid: Tensor | None = None,
) -> Tensor:
    """Reward of each response against the other responses to its prompt (GRPO, Shao et al. 2024, arXiv:2402.03300).

        A_i = (R_i - mean_g) / (std_g + eps),    std_g with Bessel's correction

    `scale_by_std=False` leaves the division out (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). Groups may differ in
    size and their rows may stand anywhere. Degenerate groups are always finite: no spread gives exactly 0, and a group
    of one gives 0 or, with `singleton="raw"`, is taken to have mean 0 and standard deviation 1.

    Args:
        rewards: (B,) floating point.
        groups: (B,) int64, equal for responses to one prompt.
        eps: added to the standard deviation.
        valid: (B,) bool; rows where it is false stay out of their group's statistics and get 0.

    Returns:
        (B,) advantage of each response.
    """
    table = Groups.of(rewards, groups, valid)
    if not scale_by_std:
        return table.with_singletons(table.centred, singleton, table.rewards)
    return table.with_singletons(table.centred / (table.std()[table.group] + eps), singleton, table.rewards / (1 + eps))


@torch.no_grad()
def rloo_advantages(
    rewards: Tensor, groups: Tensor, valid: Tensor | None = None, singleton: Singleton = "zero"
) -> Tensor:
    """Reward of each response minus the mean of the others (RLOO, Ahmadian et al. 2024, arXiv:2402.14740).

        A_i = R_i - mean of R_j over j != i in the group  =  n / (n - 1) (R_i - mean_g)

    Args:
        rewards: (B,) floating point.
        groups: (B,) int64, equal for responses to one prompt.
        valid: (B,) bool; rows where it is false stay out of their group's statistics and get 0.
        singleton: a response without others gets 0, or its reward with "raw".

    Returns:
        (B,) advantage of each response, 0 in groups without spread.
    """
    table = Groups.of(rewards, groups, valid)
    others = table.counts / (table.counts - 1).clamp_min(1)
    return table.with_singletons(table.centred * others[table.group], singleton, table.rewards)


@torch.no_grad()
def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, groups: Tensor, mask: Tensor, valid: Tensor | None = None, singleton: Singleton = "zero"
) -> Tensor:
    """Group mean subtracted, then whitened over the tokens of the minibatch (REINFORCE++-baseline, Hu 2025).

        A_i,t = whiten(R_i - mean_g),    mean and variance over all tokens inside the mask

    A longer response weighs more in the statistics, by its tokens. They are those of the rows given: call it on the
    whole minibatch. (arXiv:2501.03262)

    Args:
        rewards: (B,) floating point.
        groups: (B,) int64, equal for responses to one prompt.
        mask: (B, T) true where the policy sampled a token.
        valid: (B,) bool; rows where it is false stay out of all statistics and get 0.
        singleton: a response without siblings enters the whitening with 0, or with its reward for "raw".

    Returns:
        (B, T) advantages, 0 outside the mask.
    """
    table = Groups.of(rewards, groups, valid)
    return _spread_whitened(table.with_singletons(table.centred, singleton, table.rewards), mask, table.kept, True)


@torch.no_grad()
def gpg_advantages(
    rewards: Tensor,
    groups: Tensor,
    valid: Tensor | None = None,
    singleton: Singleton = "zero",
    active: Literal["spread", "nonzero"] = "spread",
) -> Tensor:
    """Centred rewards, scaled up for the responses that give no gradient (GPG, Chu et al. 2025, arXiv:2504.02546).

        A_i = B / (active responses) (R_i - mean_g)

    Args:
        rewards: (B,) floating point.
        groups: (B,) int64, equal for responses to one prompt.
        valid: (B,) bool; rows where it is false do not count in any of this and get 0.
        singleton: a response without siblings gets 0, or its scaled reward with "raw".
        active: "spread" counts the responses in groups with spread, which are those that give a gradient (the paper);
            "nonzero" counts rewards other than 0, which is the same for 0/1 rewards when every group without spread
            is one of zeros.

    Returns:
        (B,) advantage of each response. The scale is that of the rows given: call it on the whole minibatch.

    Raises:
        ConfigError: unknown `singleton` or `active`.
    """
    if active not in ("spread", "nonzero"):
        raise ConfigError(f"active must be 'spread' or 'nonzero', given {active!r}")
    table = Groups.of(rewards, groups, valid)
    counted = table.spread[table.group] if active == "spread" else table.rewards != 0
    if active == "spread" and singleton == "raw":
        counted = counted | (table.counts == 1)[table.group]
    scale = table.kept.sum() / (counted & table.kept).sum().clamp_min(1)
    return table.with_singletons(table.centred, singleton, table.rewards) * scale


@torch.no_grad()
def passk_advantages(
    rewards: Tensor, groups: Tensor, valid: Tensor | None = None, scale_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Only the best response of a group is paid, by its lead over the second best (Tang et al. 2025, arXiv:2503.19595).

        A_best = (R_best - R_second) / (std_g + eps),    0 for all others

    It is the leave-one-out gradient of the expected maximum over the group, which is pass@k for 0/1 rewards and
    groups of k. A tie for the best leaves no lead: all get 0, as in groups of one.

    Args:
        rewards: (B,) floating point.
        groups: (B,) int64, equal for responses to one prompt.
        valid: (B,) bool; rows where it is false stay out of their group and get 0.
        scale_by_std: false leaves the division out.
        eps: added to the standard deviation.
    """
    table = Groups.of(rewards, groups, valid)
    best = table.extreme("amax")
    at_best = table.kept & (table.rewards == best[table.group])
    second = table.extreme("amax", table.kept & ~at_best)
    alone = (table.total(at_best.to(rewards.dtype)) == 1) & table.spread
    lead = torch.where(alone, best - second, torch.zeros_like(best))
    if scale_by_std:
        lead = lead / (table.std() + eps)
    return torch.where(at_best, lead[table.group], torch.zeros_like(table.rewards))


@torch.no_grad()
def gdpo_advantages(
    terms: Mapping[str, Tensor],
    weights: Mapping[str, float],
    groups: Tensor,
    mask: Tensor,
    eps: float = 1e-6,
    whiten: bool = True,
    valid: Tensor | None = None,
    singleton: Singleton = "zero",
) -> Tensor:
    """Each reward term normalised within its group, weighted, summed, then whitened (GDPO).

        A_i = sum over terms k of w_k (R_ik - mean_gk) / (std_gk + eps),    whitened over all tokens

    so that no term drowns the others by its scale, and different combinations of terms stay different (Liu et al. 2026,
    arXiv:2601.05242). A term that is NaN for a response abstains: it has no part in that term's statistics and
    contributes 0. A response on which all terms abstain gets 0 and has no part in the whitening.

    Args:
        terms: name -> (B,) rewards, NaN where the term abstains.
        weights: name -> weight, the same names.
        groups: (B,) int64, equal for responses to one prompt.
        mask: (B, T) true where the policy sampled a token.
        eps: added to the standard deviations.
        whiten: false gives the sum as it is, on every token of the response.
        valid: (B,) bool; rows where it is false stay out of all statistics and get 0.
        singleton: as for `group_advantages`.

    Returns:
        (B, T) advantages, 0 outside the mask.

    Raises:
        ConfigError: no terms, or the names of terms and weights differ.
    """
    if not terms or set(terms) != set(weights):
        raise ConfigError(
            f"gdpo needs one weight per reward term, given terms {sorted(terms)} and weights {sorted(weights)}"
        )
    total: Tensor | None = None
    scored = torch.zeros_like(groups, dtype=torch.bool)
    for name in sorted(terms):
        given = ~terms[name].isnan() if valid is None else valid.bool() & ~terms[name].isnan()
        part = weights[name] * group_advantages(terms[name], groups, True, eps, singleton, given)
        total, scored = part if total is None else total + part, scored | given
    assert total is not None
    return _spread_whitened(total, mask, scored, whiten)


def _spread_whitened(advantages: Tensor, mask: Tensor, rows: Tensor, whiten: bool) -> Tensor:
    """Advantages (B,) on every token of their response, whitened over the tokens of `rows` (B,) bool."""
    require_rank(2, mask=mask)
    require_same_shape(**{"one column of mask": mask.new_zeros(len(mask)), "advantages": advantages})
    kept = mask.bool() & rows[:, None]
    spread = torch.where(kept, advantages[:, None], torch.zeros_like(advantages[:, None]))
    return masked_whiten(spread, kept) if whiten else spread
