"""The weights that mix reward terms into one reward, changeable while training goes on."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rlkit.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Normalization", "RewardWeights", "mix", "normalized"]

Normalization = Literal["none", "batch", "group"]
"""What a term is measured against before it is weighted: nothing, the batch, or the responses to the same prompt."""


def mix(
    terms: Mapping[str, Tensor],
    weights: Mapping[str, float],
    *,
    normalization: Mapping[str, Normalization] | None = None,
    groups: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of reward terms, each normalised first where that is asked for.

        R = sum_k w_k N_k(r_k)

    With "group" for every term this is GDPO's order (Liu et al. 2026, arXiv:2601.05242), normalise, then sum: a loud
    term does not drown the others, and different combinations of terms stay different. Without, terms are summed as
    they are, and what is normalised afterwards is their sum.

    Args:
        terms: raw reward (B,) per term, NaN where the term abstained.
        weights: weight per term, the same names.
        normalization: "none", "batch" or "group" per term, see `normalized`; "none" for terms left out.
        groups: (B,) int64, equal for responses to one prompt; needed for "group".
        eps: added to the standard deviation.

    Returns:
        rewards (B,) of the terms' dtype, an abstained term contributing 0, and valid (B,) bool, false where all terms
        abstained.

    Raises:
        ConfigError: no terms; weights for other names, or normalization for a name that is no term; an unknown
            normalization; "group" without `groups`.
    """
    import torch

    if not terms or set(terms) != set(weights):
        raise ConfigError(f"mixing needs one weight per reward term; terms {sorted(terms)}, weights {sorted(weights)}")
    kinds = normalization or {}
    if unknown := sorted(set(kinds) - set(terms)):
        raise ConfigError(f"normalization names {unknown}, which are no reward terms; terms are {sorted(terms)}")
    first = next(iter(terms.values()))
    rewards, valid = torch.zeros_like(first), torch.zeros_like(first, dtype=torch.bool)
    for name, term in terms.items():
        given = ~term.isnan()
        rewards = rewards + weights[name] * normalized(term, kinds.get(name, "none"), groups, eps)
        valid = valid | given
    return rewards, valid


def normalized(term: Tensor, kind: Normalization, groups: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """A reward term (B,) as it enters the sum, 0 where it abstained.

        batch:  (r - mean) / (std + eps)    over all samples that the term did not abstain from
        group:  the same within each group

    The standard deviation has Bessel's correction. No spread, or a single sample, gives 0.

    Args:
        term: (B,) raw reward, NaN where the term abstained.
        kind: "none", "batch" or "group".
        groups: (B,) int64, equal for responses to one prompt; needed for "group".
        eps: added to the standard deviation.

    Raises:
        ConfigError: another kind, or "group" without `groups`.
    """
    import torch

    from rlkit.algorithms.advantages import group_advantages

    given = ~term.isnan()
    if kind == "none":
        return torch.where(given, term, torch.zeros_like(term))
    if kind == "batch":
        # The whole batch as one group.
        return group_advantages(term, torch.zeros_like(term, dtype=torch.int64), valid=given, eps=eps)
    if kind != "group":
        raise ConfigError(f"normalization must be 'none', 'batch' or 'group', given {kind!r}")
    if groups is None:
        raise ConfigError("normalization 'group' needs to know which responses belong to one prompt: pass groups (B,)")
    return group_advantages(term, groups, valid=given, eps=eps)


class RewardWeights:
    """The weights in force. A change is all or nothing; whoever reads takes a snapshot with `current`.

    Args:
        weights: weight per term; the terms are fixed from here on.

    Raises:
        ConfigError: no terms, or a weight that is no finite number.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        if not weights:
            raise ConfigError("reward weights need at least one term, given none")
        self._weights = {name: _finite(name, weight) for name, weight in weights.items()}

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms."""
        return tuple(self._weights)

    @property
    def current(self) -> dict[str, float]:
        """A copy of the weights in force."""
        return dict(self._weights)

    def settings(self) -> dict[str, float]:
        """The weights as a live setting."""
        return self.current

    def set(self, changes: Mapping[str, float]) -> None:
        """Changes the weights that are named and leaves the others.

        Raises:
            ConfigError: an unknown term (known ones and the nearest are named) or a weight that is no finite number;
                no weight has been changed then.
        """
        for name in changes:
            if name not in self._weights:
                near = difflib.get_close_matches(str(name), self._weights, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown reward term {name!r}{hint} Terms are: {', '.join(self._weights)}")
        self._weights = self._weights | {name: _finite(name, weight) for name, weight in changes.items()}

    def state_dict(self) -> dict[str, Any]:
        """{"weights": {term: weight}}."""
        return {"weights": self.current}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts saved weights in force.

        Raises:
            CheckpointError: the state has other keys, or other terms than these.
        """
        if set(state) != {"weights"}:
            raise CheckpointError(f"reward weights are saved under the key 'weights' alone, given {sorted(state)}")
        if set(state["weights"]) != set(self._weights):
            raise CheckpointError(
                f"saved reward weights are for terms {sorted(state['weights'])}, given terms {sorted(self._weights)}"
            )
        self.set(state["weights"])

    def __repr__(self) -> str:
        return f"RewardWeights({self._weights})"


def _finite(name: str, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not math.isfinite(weight):
        raise ConfigError(f"the weight of reward term {name!r} must be a finite number, given {weight!r}")
    return float(weight)
