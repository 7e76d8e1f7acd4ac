"""Losses that learn from pairs of responses, and the pairs in groups of scored responses."""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlkit.algorithms.groups import Groups
from rlkit.algorithms.masked import masked_sum
from rlkit.algorithms.policy_losses import LossMetrics
from rlkit.algorithms.shapes import require_rank, require_same_shape
from rlkit.errors import ConfigError, DataError

__all__ = ["DpoKind", "best_and_worst", "dpo_loss", "sequence_logprobs"]

DpoKind: TypeAlias = Literal["sigmoid", "ipo", "hinge"]


def sequence_logprobs(logprobs: Tensor, mask: Tensor, average: bool) -> Tensor:
    """Log-prob (B,) of each response: the sum over its tokens, or their mean; 0 for a response without tokens.

    Args:
        logprobs: (B, T), differentiable.
        mask: (B, T) true on the response's tokens, its end token included.
        average: divide by the number of tokens (length-normalised).
    """
    require_rank(2, logprobs=logprobs, mask=mask)
    total = masked_sum(logprobs, mask, dim=1)
    return total / mask.bool().sum(1).clamp_min(1) if average else total


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None,
    ref_rejected: Tensor | None,
    beta: float,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, LossMetrics]:
    """Loss of each pair of responses to one prompt, with h = log p(chosen) / q(chosen) - log p(rejected) / q(rejected).

    - "sigmoid": -log sigmoid(beta h) (DPO, Rafailov et al. 2023, arXiv:2305.18290, eq. 7). Log-probs are *summed* over
      the response; averaged ones give length-normalised DPO, which wants a larger beta. With `label_smoothing` e it is
      -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), for labels that are wrong with probability e
      (Mitchell 2023, conservative DPO).
    - "ipo": (h - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036, eq. 17). Log-probs are *averaged*: the target
      1 / (2 beta) is one number for all lengths. Summed ones are accepted, and results then depend on length.
    - "hinge": max(0, 1 - beta h) (SLiC-HF, Zhao et al. 2023, arXiv:2305.10425, with a reference). Log-probs are
      *summed*, as for "sigmoid".

    The choice is made by the caller, with `sequence_logprobs(..., average=)`, for all four alike.

    Args:
        chosen, rejected: (N,) log-probs of the responses under the policy, nats; differentiable.
        ref_chosen, ref_rejected: (N,) under the reference, constants; both None for no reference (q = 1).
        beta: strength of the reference, above 0.
        kind: one of the above.
        label_smoothing: 0 or more and below 0.5; only "sigmoid" has it.

    Returns:
        pair_loss (N,) and metrics over pairs: accuracy (h above 0), margin (beta h), chosen_reward and rejected_reward
        (beta log p / q of each).

    Raises:
        ConfigError: unknown kind, `beta` not above 0, or a label smoothing that is out of range or without meaning.
        DataError: shapes differ, or only one reference is given.
    """
    if kind not in get_args(DpoKind):
        raise ConfigError(f"unknown preference loss {kind!r}; expected one of {', '.join(get_args(DpoKind))}")
    if not beta > 0:
        raise ConfigError(f"beta must be above 0, given {beta!r}")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing must be 0 or more and below 0.5, given {label_smoothing!r}")
    if label_smoothing and kind != "sigmoid":
        raise ConfigError(f"label_smoothing has a meaning for 'sigmoid' only, given {label_smoothing!r} with {kind!r}")
    if (ref_chosen is None) != (ref_rejected is None):
        raise DataError("give log-probs of the reference for both responses or for neither, given one of the two")
    ratios = _log_ratio(chosen, ref_chosen), _log_ratio(rejected, ref_rejected)
    require_rank(1, chosen=chosen)
    require_same_shape(chosen=chosen, rejected=rejected)
    advantage = ratios[0] - ratios[1]
    margin = beta * advantage
    if kind == "ipo":
        loss = (advantage - 1 / (2 * beta)).square()
    elif kind == "hinge":
        loss = torch.relu(1 - margin)
    else:
        loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    rewards = [beta * ratio.detach() for ratio in ratios]
    count = torch.tensor(len(chosen), device=chosen.device)
    metrics: LossMetrics = {
        "accuracy": ((margin.detach() > 0).sum(), count),
        "margin": (margin.detach().sum(), count),
        "chosen_reward": (rewards[0].sum(), count),
        "rejected_reward": (rewards[1].sum(), count),
    }
    return loss, metrics


def _log_ratio(logprobs: Tensor, reference: Tensor | None) -> Tensor:
    if reference is None:
        return logprobs
    require_same_shape(logprobs=logprobs, reference=reference)
    return logprobs - reference.detach()


@torch.no_grad()
def best_and_worst(
    rewards: Tensor, groups: Tensor, valid: Tensor | None = None, ties: Literal["drop", "first"] = "drop"
) -> tuple[Tensor, Tensor]:
    """The best and the worst response to each prompt, as pairs for online DPO (Guo et al. 2024, arXiv:2402.04792).

    Among equals the first row is the best and the last row the worst.

    Args:
        rewards: (B,) floating point.
        groups: (B,) int64, equal for responses to one prompt.
        valid: (B,) bool; rows where it is false are in no pair.
        ties: a group without spread gives no pair, or with "first" its first and last row. A group of one never does.

    Returns:
        chosen_rows (N,) and rejected_rows (N,) int64, in the order of the group ids.

    Raises:
        ConfigError: unknown `ties`.
    """
    if ties not in ("drop", "first"):
        raise ConfigError(f"ties must be 'drop' or 'first', given {ties!r}")
    table = Groups.of(rewards, groups, valid)
    paired = table.spread if ties == "drop" else table.counts > 1
    rows = torch.arange(len(rewards), device=rewards.device)

    def edge(value: Tensor, last: bool) -> Tensor:
        """(groups,) first or last row whose reward is the value (groups,) of its group."""
        start = torch.full_like(table.counts, -1 if last else len(rewards), dtype=torch.int64)
        found = table.kept & (table.rewards == value[table.group])
        found_rows = torch.where(found, rows, start[table.group])
        return start.scatter_reduce(0, table.group, found_rows, "amax" if last else "amin")

    best, worst = edge(table.extreme("amax"), last=False), edge(table.extreme("amin"), last=True)
    return best[paired], worst[paired]
