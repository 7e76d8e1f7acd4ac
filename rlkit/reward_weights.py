"""The weights that mix reward terms into one reward, changeable while training goes on."""

import difflib
import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlkit.errors import CheckpointError, ConfigError

__all__ = ["RewardWeights", "mix"]


def mix(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Weighted sum of reward terms.

    Args:
        terms: raw reward (B,) per term, NaN where the term abstained.
        weights: weight per term, the same names.

    Returns:
        rewards (B,) float32, an abstained term contributing 0, and valid (B,) bool, false where all terms abstained.

    Raises:
        ConfigError: no terms, or terms and weights have different names.
    """
    if not terms or set(terms) != set(weights):
        raise ConfigError(f"mixing needs one weight per reward term; terms {sorted(terms)}, weights {sorted(weights)}")
    first = next(iter(terms.values()))
    rewards, valid = torch.zeros_like(first), torch.zeros_like(first, dtype=torch.bool)
    for name, term in terms.items():
        given = ~term.isnan()
        rewards = rewards + weights[name] * torch.where(given, term, torch.zeros_like(term))
        valid = valid | given
    return rewards, valid


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
