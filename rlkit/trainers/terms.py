"""The reward terms in force: those a trainer was built with, or those of a step, a stage or a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Self

from rlkit.controllers.reward import RewardController
from rlkit.errors import CheckpointError, ConfigError
from rlkit.rewards import RewardWeights
from rlkit.trainers.assemble import as_rewards

RewardOfStep = Callable[[int], RewardController]


class RewardTerms:
    """Reward controllers and their weights, and the rule by which they change from step to step.

    Args:
        given: what a user passes for rewards, see `as_rewards`.
        weights: starting weights of some terms.
    """

    def __init__(self, given: Any, weights: Mapping[str, float] | None = None) -> None:
        self.controllers, starting = as_rewards(given)
        self.weights = RewardWeights(starting)
        if weights is not None:
            self.weights.set(weights)
        self._of_step: RewardOfStep | None = None
        self._stage: Any = None
        self._own = (self.controllers, self.weights)

    @property
    def names(self) -> list[str]:
        """Names of the terms."""
        return [controller.name for controller in self.controllers]

    def use(self, reward: RewardController | RewardOfStep, step: int) -> None:
        """Makes one reward, or the one that a function of the step gives, the only one."""
        if isinstance(reward, RewardController):
            self._replace([reward])
        elif callable(reward):
            self._replace([reward(step)])
            self._of_step = reward
        else:
            raise ConfigError(f"expected a RewardController or a function of the step, got {type(reward).__name__}")

    def use_all(self, given: Any) -> None:
        """Replaces all terms and weights."""
        controllers, weights = as_rewards(given)
        self._replace(controllers, weights)

    def follow(self, step: int, stage_rewards: Any) -> bool:
        """Takes the terms of a step or of a curriculum's stage; whether they are others than before.

        Args:
            step: steps completed.
            stage_rewards: rewards of the stage in force; None where it has none of its own.
        """
        before = self.controllers
        if self._of_step is not None:
            self._take([self._of_step(step)])
        elif stage_rewards is not self._stage:
            if stage_rewards is None:
                self.controllers, self.weights = self._own
            else:
                self._take(*as_rewards(stage_rewards))
            self._stage = stage_rewards
        return before is not self.controllers

    def copy(self) -> Self:
        """The terms and rules as they are now, to go back to with `restore`; weights are shared."""
        return copy(self)

    def restore(self, before: Self) -> None:
        """Goes back to what `copy` gave."""
        self.__dict__.update(before.__dict__)

    def state_dict(self) -> dict[str, Any]:
        """{"weights": those in force, "own": those that come back after a stage with rewards of its own, else None}."""
        own = self._own_weights
        return {"weights": self.weights.state_dict(), "own": None if own is None else own.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave. Raises CheckpointError for other keys, or weights of other terms."""
        if set(state) != {"weights", "own"}:
            raise CheckpointError(f"saved reward weights hold weights and own, given {sorted(state)}")
        own = self._own_weights
        if (own is None) != (state["own"] is None):
            raise CheckpointError(
                f"the saved weights of the trainer's own rewards are {state['own']}, but the rewards in force "
                f"({', '.join(self.names)}) are {'its own' if own is None else 'those of a stage'}"
            )
        if own is not None:
            own.load_state_dict(state["own"])
        self.weights.load_state_dict(state["weights"])

    @property
    def _own_weights(self) -> RewardWeights | None:
        """Weights of the trainer's own rewards while a stage has others in their place."""
        return self._own[1] if self._of_step is None and self._own[1] is not self.weights else None

    def _replace(self, controllers: list[RewardController], weights: Mapping[str, float] | None = None) -> None:
        self._of_step = None
        self._take(controllers, weights)
        self._own = (self.controllers, self.weights)

    def _take(self, controllers: list[RewardController], weights: Mapping[str, float] | None = None) -> None:
        if weights is None and [id(c) for c in controllers] == [id(c) for c in self.controllers]:
            return
        known = self.weights.current
        self.controllers = controllers
        self.weights = RewardWeights(weights or {c.name: known.get(c.name, 1.0) for c in controllers})
