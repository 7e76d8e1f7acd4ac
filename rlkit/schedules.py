"""Numbers that follow a rule while training goes on: learning rates and the adaptive KL coefficient.

Pure functions of the step and of what was measured, so there is no state to save besides the step and the settings in
force. Loads no torch.
"""

import math

from rlkit.errors import ConfigError, DataError

__all__ = ["adapt_kl_coef", "learning_rate", "ramp"]

KINDS = ("constant", "linear", "cosine")


def learning_rate(kind: str, peak: float, step: int, warmup_steps: int = 0, total_steps: int | None = None) -> float:
    """Learning rate of one step: a linear rise to the peak over the warm-up, then the named curve.

    Step s of the warm-up has peak * (s + 1) / warmup_steps, so no step is taken at rate 0. "linear" falls on a straight
    line, "cosine" on half a cosine wave (Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts).

    Args:
        kind: "constant", "linear" or "cosine".
        peak: rate at the end of the warm-up.
        step: counted from 0.
        warmup_steps: steps of the warm-up; 0 for none.
        total_steps: for "linear" and "cosine", the step at which the rate reaches 0, where it stays.

    Raises:
        ConfigError: unknown kind, a decaying one without `total_steps`, or a warm-up as long as the run.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown learning-rate schedule {kind!r}; expected constant, linear or cosine")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if kind == "constant":
        return peak
    if total_steps is None:
        raise ConfigError(f"a {kind} learning rate needs total_steps, the step at which it reaches 0")
    if total_steps <= warmup_steps:
        raise ConfigError(f"total_steps ({total_steps}) must be more than warmup_steps ({warmup_steps})")
    progress = min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)
    return peak * (1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


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


def ramp(start: float, end: float | None, step: int, steps: int) -> float:
    """A number on a straight line from `start` at step 0 to `end` at step `steps`, where it stays.

    Args:
        end: None keeps `start`.
        step: counted from 0.
        steps: at least 1.
    """
    return start if end is None else start + (end - start) * min(step / steps, 1.0)
