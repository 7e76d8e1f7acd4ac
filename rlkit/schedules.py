"""Numbers that follow a rule while training goes on: learning rates and the adaptive KL coefficient. Loads no torch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from rlkit.errors import CheckpointError, ConfigError, DataError

__all__ = [
    "AdaptiveKL",
    "ConstantRate",
    "CosineRate",
    "LearningRate",
    "LinearRate",
    "adapt_kl_coef",
    "learning_rate",
]


class LearningRate(ABC):
    """A learning rate that rises linearly over `warmup_steps` steps and then follows the subclass's curve.

    Step s (from 0) of the warm-up has peak * (s + 1) / warmup_steps, so no step is taken at rate 0.

    Args:
        peak: rate at the end of the warm-up. May be set at any time; the curve scales with it.
        warmup_steps: steps of the warm-up; 0 for none.

    Raises:
        ConfigError: a negative or non-finite peak, or negative warm-up.
    """

    def __init__(self, peak: float, warmup_steps: int = 0) -> None:
        if warmup_steps < 0:
            raise ConfigError(f"warmup_steps must be 0 or more, given {warmup_steps}")
        self.peak = peak
        self.warmup_steps = warmup_steps
        self._steps = 0

    @property
    def peak(self) -> float:
        """Rate at the end of the warm-up."""
        return self._peak

    @peak.setter
    def peak(self, value: float) -> None:
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"a learning rate must be a finite number of 0 or more, given {value!r}")
        self._peak = float(value)

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self._steps

    @property
    def value(self) -> float:
        """Rate of the step that comes next."""
        return self.at(self._steps)

    def step(self) -> float:
        """Counts one step as taken and returns the rate of the next."""
        self._steps += 1
        return self.value

    def at(self, step: int) -> float:
        """Rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self._peak * (step + 1) / self.warmup_steps
        return self._peak * self._fraction(step)

    @abstractmethod
    def _fraction(self, step: int) -> float:
        """Share of the peak at a step after the warm-up."""

    def state_dict(self) -> dict[str, Any]:
        """{"peak", "steps"}."""
        return {"peak": self._peak, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores peak and steps taken.

        Raises:
            CheckpointError: other keys than `state_dict` gives.
        """
        _require_keys(self, state, {"peak", "steps"})
        self.peak = state["peak"]
        self._steps = int(state["steps"])


class ConstantRate(LearningRate):
    """The peak, for ever."""

    def _fraction(self, step: int) -> float:
        return 1.0


class _DecayingRate(LearningRate):
    """Falls to 0 at step `total_steps` and stays there.

    Args:
        peak, warmup_steps: as for `LearningRate`.
        total_steps: more than `warmup_steps`.
    """

    def __init__(self, peak: float, total_steps: int, warmup_steps: int = 0) -> None:
        super().__init__(peak, warmup_steps)
        if total_steps <= warmup_steps:
            raise ConfigError(f"total_steps ({total_steps}) must be more than warmup_steps ({warmup_steps})")
        self.total_steps = total_steps

    def _progress(self, step: int) -> float:
        return min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)


class LinearRate(_DecayingRate):
    """Falls on a straight line from the peak to 0."""

    def _fraction(self, step: int) -> float:
        return 1.0 - self._progress(step)


class CosineRate(_DecayingRate):
    """Falls from the peak to 0 on half a cosine wave (Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts)."""

    def _fraction(self, step: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * self._progress(step)))


def learning_rate(kind: str, peak: float, warmup_steps: int = 0, total_steps: int | None = None) -> LearningRate:
    """The schedule that a configuration names.

    Args:
        kind: "constant", "linear" or "cosine".
        peak, warmup_steps: as for `LearningRate`.
        total_steps: for "linear" and "cosine", the step at which the rate reaches 0.

    Raises:
        ConfigError: unknown kind, or a decaying one without `total_steps`.
    """
    if kind == "constant":
        return ConstantRate(peak, warmup_steps)
    if kind not in ("linear", "cosine"):
        raise ConfigError(f"unknown learning-rate schedule {kind!r}; expected constant, linear or cosine")
    if total_steps is None:
        raise ConfigError(f"a {kind} learning rate needs total_steps, the step at which it reaches 0")
    return (LinearRate if kind == "linear" else CosineRate)(peak, total_steps, warmup_steps)


def adapt_kl_coef(coef: float, kl: float, target: float, horizon: float, samples: int) -> float:
    """One step of the controller that steers the KL towards a target (Ziegler et al. 2019, arXiv:1909.08593, 2.2).

        error = clip(KL / target - 1, -0.2, 0.2),      coef <- coef * (1 + error * samples / horizon)

    Args:
        coef: the KL coefficient in force.
        kl: mean KL measured, in nats per response.
        target: KL to hold, in nats per response, above 0.
        horizon: responses over which the coefficient reacts, above 0.
        samples: responses that `kl` is the mean of.

    Raises:
        DataError: the measured KL is not finite.
    """
    if not math.isfinite(kl):
        raise DataError(f"the measured KL must be finite to steer the KL coefficient, given {kl!r}")
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * samples / horizon)


class AdaptiveKL:
    """A KL coefficient that `adapt_kl_coef` moves after each measurement.

    Args:
        initial: coefficient at the start, above 0 (the rule multiplies, so 0 would stay 0).
        target: KL to hold, in nats per response, above 0. May be set at any time.
        horizon: responses over which the coefficient reacts, above 0.

    Raises:
        ConfigError: a value is not above 0 or not finite.
    """

    def __init__(self, initial: float, target: float, horizon: float) -> None:
        self._value = _positive("initial", initial)
        self.target = target
        self._horizon = _positive("horizon", horizon)

    @property
    def value(self) -> float:
        """The coefficient in force."""
        return self._value

    @value.setter
    def value(self, value: float) -> None:
        self._value = _positive("value", value)

    @property
    def target(self) -> float:
        """KL to hold, in nats per response."""
        return self._target

    @target.setter
    def target(self, value: float) -> None:
        self._target = _positive("target", value)

    def update(self, kl: float, samples: int) -> float:
        """Takes the mean KL (nats per response) of `samples` responses and returns the new coefficient.

        Raises:
            DataError: the KL is not finite; the coefficient is left as it was.
        """
        self._value = adapt_kl_coef(self._value, kl, self._target, self._horizon, samples)
        return self._value

    def state_dict(self) -> dict[str, Any]:
        """{"value", "target", "horizon"}."""
        return {"value": self._value, "target": self._target, "horizon": self._horizon}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores all three numbers.

        Raises:
            CheckpointError: other keys than `state_dict` gives.
        """
        _require_keys(self, state, {"value", "target", "horizon"})
        self._value, self._target, self._horizon = (_positive(k, state[k]) for k in ("value", "target", "horizon"))


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} of the adaptive KL coefficient must be a finite number above 0, given {value!r}")
    return float(value)


def _require_keys(owner: object, state: Mapping[str, Any], keys: set[str]) -> None:
    if odd := sorted(set(state) ^ keys):
        raise CheckpointError(f"state of {type(owner).__name__} must have the keys {sorted(keys)}; it differs in {odd}")
