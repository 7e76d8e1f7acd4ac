"""Estimates of KL(policy || reference) from the log-probs of sampled tokens."""

from typing import Literal, get_args

from torch import Tensor

from rlkit.algorithms.shapes import require_same_shape
from rlkit.errors import ConfigError

__all__ = ["KlKind", "kl_estimate"]

KlKind = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of the KL divergence, in nats, with d = log p - log q of the sampled token.

    Which option holds the policy near the reference depends on where it is used, because the derivative of an
    estimate is not an estimate of the derivative. Tokens are taken to be sampled from p; what is said of gradients
    holds in expectation. (Values: Schulman 2020, "Approximating KL divergence".)

    - "k1": d. Unbiased value, may be negative. *In the reward* its policy gradient is the exact gradient of
      KL(p || q). *In the loss* its gradient is zero in expectation: noise that holds nothing.
    - "k2": d^2 / 2. Biased value, low variance. In the loss: the exact gradient of KL(p || q).
    - "k3": exp(-d) - 1 + d. Unbiased value, never negative. In the loss: the gradient of the *other* direction,
      KL(q || p). Times the ratio p / p_old (whose value is 1) it gives the exact gradient of KL(p || q).
    - "abs": |d|. In the loss: the gradient of the total variation 2 TV(p, q), up to the token where d = 0.
    - "k1+", "k3+", "abs+": the value of the named estimate with the gradient of "k2", so in the loss the exact
      gradient of KL(p || q).

    *In the reward* an estimate is a constant that multiplies the gradient of log p, so only its value counts: "k1" and
    "k1+" give the gradient of KL(p || q), "k3" and "k3+" that of KL(p || q) - KL(q || p), "k2" that of
    E[d^2 / 2] - KL(p || q). The last two vanish to first order near the reference and hold little there.

    What pulls towards the reference, with a positive coefficient: "k1" subtracted from the reward, or any but "k1"
    added to the loss. For "k3", d is clamped to [-20, 20] and the value to [-10, 10]; where a clamp acts its gradient
    is 0.

    Args:
        logprobs: any shape, of the policy; differentiable.
        ref_logprobs: same shape, of the reference.
        kind: one of the above.

    Raises:
        ConfigError: unknown kind.
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    if kind not in get_args(KlKind):
        raise ConfigError(f"unknown KL estimator {kind!r}; expected one of {', '.join(get_args(KlKind))}")
    difference = logprobs - ref_logprobs
    if kind.endswith("+"):
        carrier = difference.square() / 2
        return carrier - carrier.detach() + kl_estimate(logprobs, ref_logprobs, kind[:-1]).detach()
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "abs":
        return difference.abs()
    back = (-difference).clamp(-20.0, 20.0)
    return (back.exp() - back - 1).clamp(-10.0, 10.0)
