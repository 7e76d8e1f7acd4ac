"""Which pool the next prompt comes from: weights of a stage, running pass rates, and the draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlkit.curriculum.stages import Ramp, Stage
from rlkit.errors import CheckpointError, ConfigError


def weights_in(
    stage: Stage, stage_steps: int, rates: Mapping[str, float | None], floor: float, override: Mapping[str, float]
) -> dict[str, float]:
    """Weight of each pool after `stage_steps` steps of a stage.

    Args:
        stage: its mixture says how the pools are weighed.
        stage_steps: steps taken in the stage.
        rates: pass rate of each pool, None where nothing is known; the names are the pools.
        floor: what "by_pass_rate" adds to p (1 - p).
        override: weights set by hand, in the place of the mixture's.
    """
    weights: dict[str, float] = {}
    for pool, rate in rates.items():
        if pool in override:
            weights[pool] = override[pool]
        elif isinstance(stage.mixture, str):
            p = 0.5 if rate is None else rate
            weights[pool] = p * (1.0 - p) + floor
        else:
            entry = stage.mixture.get(pool, 0.0)
            weights[pool] = entry.at(stage_steps) if isinstance(entry, Ramp) else entry
    return weights


def require_weight(stage: Stage, pools: Sequence[str], floor: float, override: Mapping[str, float]) -> None:
    """Raises ConfigError where all weights of a stage are 0 at some step.

    The sum of straight pieces is smallest where one of them ends, so only those steps are looked at.
    """
    ends = [] if isinstance(stage.mixture, str) else [w.steps for w in stage.mixture.values() if isinstance(w, Ramp)]
    rates = dict.fromkeys(pools)
    for at in sorted({0, *ends}):
        total = sum(weights_in(stage, at, rates, floor, override).values())
        if not math.isfinite(total):
            raise ConfigError(f"the weights of stage {stage.name!r} are too large to add up; only proportions matter")
        if total <= 0.0:
            when = f" after {at} steps" if at else ""
            raise ConfigError(f"stage {stage.name!r} has no pool with a positive weight{when}; at least one is needed")


def draw(rng: np.random.Generator, weights: Mapping[str, float], count: int) -> list[str]:
    """The pools of the next `count` prompts, independent draws in proportion to the weights."""
    names, sums = list(weights), np.cumsum(list(weights.values()))
    last = max(i for i, name in enumerate(names) if weights[name] > 0.0)
    places = np.searchsorted(sums, rng.random(count) * sums[-1], side="right")
    return [names[min(int(place), last)] for place in places]


class PassRates:
    """Share of rollouts that pass, by pool, as a running average over rollouts.

    A step with m rollouts of a pool, of which k pass, moves that pool's average by

        s <- d^m s + (1 - d^m) k / m,      w <- d^m w + (1 - d^m),      rate = s / w

    so the order of rollouts in a step plays no part, and the first steps are not pulled towards 0.

    Args:
        pools: names.
        pass_at: least reward that passes.
        decay: d, what is left of a rollout's weight after one more rollout of its pool.
    """

    def __init__(self, pools: Sequence[str], pass_at: float, decay: float) -> None:
        self._pass_at, self._decay = pass_at, decay
        self._sums = dict.fromkeys(pools, 0.0)
        self._weights = dict.fromkeys(pools, 0.0)

    def add(self, pools: Sequence[str], rewards: Sequence[float | None]) -> None:
        """Adds the rollouts of a step: the pool and the reward of each. NaN or None, an abstention, is left out."""
        passed: dict[str, list[bool]] = {}
        for pool, reward in zip(pools, rewards, strict=True):
            if reward is not None and not math.isnan(reward):
                passed.setdefault(pool, []).append(bool(reward >= self._pass_at))
        for pool, given in passed.items():
            kept = self._decay ** len(given)
            self._sums[pool] = kept * self._sums[pool] + (1.0 - kept) * sum(given) / len(given)
            self._weights[pool] = kept * self._weights[pool] + (1.0 - kept)

    def rates(self) -> dict[str, float | None]:
        """Pass rate of each pool, None where no rollout has been scored."""
        return {pool: self._sums[pool] / weight if weight else None for pool, weight in self._weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """{"sums": {pool: s}, "weights": {pool: w}}."""
        return {"sums": dict(self._sums), "weights": dict(self._weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from saved averages. Raises CheckpointError for other keys or pools."""
        pools = set(self._sums)
        if set(state) != {"sums", "weights"} or any(set(part) != pools for part in state.values()):
            raise CheckpointError(f"saved pass rates must hold sums and weights of the pools {sorted(pools)}")
        self._sums = {pool: float(state["sums"][pool]) for pool in self._sums}
        self._weights = {pool: float(state["weights"][pool]) for pool in self._weights}
