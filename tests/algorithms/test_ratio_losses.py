"""Losses other than PPO's: goldens by hand, what each does at its bound, what the mask leaves out, refusals."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.aggregation import aggregate
from rlkit.algorithms.gradient_losses import dppo_kl_loss, dppo_tv_loss, dro_loss, gpg_loss
from rlkit.algorithms.ratio_losses import RESPONSE_AGGREGATION, cispo_loss, gmpo_loss, gspo_loss, sapo_loss
from rlkit.errors import ConfigError, DataError

Numbers = list[float]
NAN = float("nan")
LOSSES: dict[str, Callable[..., Any]] = {
    "gspo": partial(gspo_loss, clip_low=0.2, clip_high=0.2),
    "cispo": partial(cispo_loss, clip_low=0.2, clip_high=0.2),
    "sapo": partial(sapo_loss, tau_pos=1.0, tau_neg=1.05),
    "gmpo": partial(gmpo_loss, clip_low=0.4, clip_high=0.4),
    "dppo_tv": partial(dppo_tv_loss, clip_low=0.2, clip_high=0.2),
    "dppo_kl": partial(dppo_kl_loss, clip_low=0.05, clip_high=0.05),
    "dro": partial(dro_loss, beta=0.1),
    "gpg": lambda logprobs, _, advantages, mask: gpg_loss(logprobs, advantages, mask),
}


def _run(
    loss: Callable[..., Any],
    new: Numbers,
    old: Numbers,
    advantages: Numbers,
    mask: list[int] | None = None,
    mode: str = "token-sum",
) -> tuple[Numbers, Numbers, dict[str, float]]:
    """Token losses of one response from log-probs, the gradient of their aggregate, and metrics as means."""
    logprobs = torch.tensor([new], dtype=torch.float64, requires_grad=True)
    before = torch.tensor([old], dtype=torch.float64, requires_grad=True)
    gains = torch.tensor([advantages], dtype=torch.float64, requires_grad=True)
    kept = torch.ones_like(logprobs) if mask is None else torch.tensor([mask])
    token_loss, metrics = loss(logprobs, before, gains, kept)
    aggregate(token_loss, kept, mode).backward()
    assert logprobs.grad is not None
    assert before.grad is None
    assert gains.grad is None
    means = {name: float(total) / max(int(count), 1) for name, (total, count) in metrics.items()}
    return token_loss.detach()[0].tolist(), logprobs.grad[0].tolist(), means


def _logs(*probabilities: float) -> Numbers:
    return [math.log(p) for p in probabilities]


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    advantages = [1.5, 1.5, 1.5] if name == "gmpo" else [1.5, -0.7, 0.0]
    new = _logs(0.5, 0.2, 0.9)
    _, grad, metrics = _run(LOSSES[name], new, new, advantages, mode="seq-mean-token-mean")
    assert grad == pytest.approx([-a / 3 for a in advantages], abs=1e-7)
    assert metrics.get("approx_kl", 0.0) == metrics.get("clip_fraction", 0.0) == 0.0
    assert metrics.get("ratio_mean", 1.0) == 1.0


def test_gspo_shares_one_ratio() -> None:
    old, new = [-1.0, -2.0], [-0.7, -2.1]
    shared = math.exp(0.1)
    loss, grad, metrics = _run(LOSSES["gspo"], new, old, [2.0, 2.0])
    assert loss == pytest.approx([-2 * shared] * 2)
    assert grad == pytest.approx([-2 * shared] * 2)
    assert metrics["ratio_mean"] == pytest.approx(shared)
    assert metrics["approx_kl"] == pytest.approx(-0.1)
    assert metrics["policy_loss"] == pytest.approx(-2 * shared)
    tight = partial(gspo_loss, clip_low=0.05, clip_high=0.05)
    loss, grad, metrics = _run(tight, new, old, [2.0, 2.0])
    assert (loss, grad) == (pytest.approx([-2.1, -2.1]), [0.0, 0.0])
    assert metrics["clip_fraction"] == 1.0
    loss, grad, metrics = _run(tight, new, old, [-1.0, -1.0])
    assert (loss, grad) == (pytest.approx([shared] * 2), pytest.approx([shared] * 2))
    assert metrics["clip_fraction"] == 0.0


def test_gspo_is_the_loss_of_the_response_under_its_aggregation() -> None:
    rng = torch.Generator().manual_seed(0)
    new = torch.randn(3, 5, generator=rng, dtype=torch.float64).requires_grad_()
    old = new.detach() + 0.1 * torch.randn(3, 5, generator=rng, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    gain = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    token_loss, _ = gspo_loss(new, old, gain[:, None].expand(3, 5), mask, 10.0, 10.0)
    (given,) = torch.autograd.grad(aggregate(token_loss, mask, RESPONSE_AGGREGATION), new)
    ratios = (((new - old) * mask).sum(1) / mask.sum(1)).exp()
    (wanted,) = torch.autograd.grad(-(gain * ratios).mean(), new)
    torch.testing.assert_close(given, wanted, atol=1e-8, rtol=1e-7)


def test_cispo_caps_the_weight_and_keeps_the_gradient() -> None:
    new, old = [-0.5, -1.0, -1.0], [-0.5 - math.log(2), -1.0 - math.log(1.1), -1.0 + math.log(4)]
    loss, grad, metrics = _run(LOSSES["cispo"], new, old, [1.0, 1.0, -1.0])
    assert loss == pytest.approx([0.6, 1.1, -0.8])
    assert grad == pytest.approx([-1.2, -1.1, 0.8])
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)
    assert metrics["ratio_mean"] == pytest.approx((2 + 1.1 + 0.25) / 3)


def test_sapo_fades_on_both_sides() -> None:
    sigmoid = 1 / (1 + math.exp(-1.0))
    loss, grad, metrics = _run(LOSSES["sapo"], [math.log(2.0), 0.0], [0.0, 0.0], [1.0, -1.0])
    assert loss == pytest.approx([-4 * sigmoid, 2 / 1.05])
    assert grad == pytest.approx([-2 * 4 * sigmoid * (1 - sigmoid), 1.0])
    assert metrics["gate_mean"] == pytest.approx((4 * sigmoid * (1 - sigmoid) + 1) / 2)
    faster = _run(LOSSES["sapo"], [math.log(2.0)], [0.0], [-1.0])[1][0]
    assert 0 < faster < -_run(LOSSES["sapo"], [math.log(2.0)], [0.0], [1.0])[1][0]


def test_gmpo_holds_tokens_at_the_bound_that_they_gain_from() -> None:
    old, new = [-1.0, -1.0], [-0.4, -1.2]
    loss, grad, metrics = _run(LOSSES["gmpo"], new, old, [1.0, 1.0], mode=RESPONSE_AGGREGATION)
    mean = math.exp((0.4 - 0.2) / 2)
    assert loss == pytest.approx([-mean, -mean])
    assert grad == pytest.approx([0.0, -mean / 2])
    assert metrics["clip_fraction"] == metrics["outside_positive_fraction"] == 0.5
    loss, grad, metrics = _run(LOSSES["gmpo"], new, old, [-1.0, -1.0], mode=RESPONSE_AGGREGATION)
    mean = math.exp((0.6 - 0.2) / 2)
    assert loss == pytest.approx([mean, mean])
    assert grad == pytest.approx([mean / 2, mean / 2])
    assert (metrics["clip_fraction"], metrics["outside_negative_fraction"]) == (0.0, 0.5)
    assert metrics["ratio_mean"] == pytest.approx(mean)


def test_dppo_tv_looks_at_the_probability_and_not_at_the_ratio() -> None:
    old, new = _logs(0.1, 0.001, 0.8, 0.5), _logs(0.4, 0.01, 0.5, 0.8)
    loss, grad, metrics = _run(LOSSES["dppo_tv"], new, old, [1.0, 1.0, -1.0, -1.0])
    assert grad == pytest.approx([0.0, -10.0, 0.0, 1.6])
    assert loss == pytest.approx([0.0, -10 * math.log(0.01), 0.0, 1.6 * math.log(0.8)])
    assert metrics["clip_fraction"] == 0.5
    capped = partial(dppo_tv_loss, clip_low=0.2, clip_high=0.2, c=5.0)
    assert _run(capped, new, old, [1.0] * 4)[1] == pytest.approx([0.0, -5.0, -0.625, 0.0])


@pytest.mark.parametrize(("bound", "grad"), [(0.2, 0.0), (0.25, -1.6)])
def test_dppo_kl_by_hand(bound: float, grad: float) -> None:
    divergence = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert divergence == pytest.approx(0.2231, abs=1e-4)
    loss = partial(dppo_kl_loss, clip_low=9.0, clip_high=bound)
    assert _run(loss, _logs(0.8), _logs(0.5), [1.0])[1] == pytest.approx([grad])
    assert _run(loss, _logs(0.8), _logs(0.5), [-1.0])[1] == pytest.approx([1.6])
    falling = partial(dppo_kl_loss, clip_low=bound, clip_high=9.0)
    assert _run(falling, _logs(0.2), _logs(0.5), [-1.0])[1] == pytest.approx([-grad / 4])


def test_dppo_kl_of_a_certain_token_is_finite() -> None:
    loss, grad, metrics = _run(LOSSES["dppo_kl"], [0.0, 0.0], [0.0, math.log(0.5)], [1.0, 1.0])
    assert (loss, grad) == ([0.0, 0.0], [-1.0, 0.0])
    assert metrics["clip_fraction"] == 0.5


def test_dro_pulls_back() -> None:
    loss, grad, metrics = _run(LOSSES["dro"], [-1.0], [-1.5], [2.0])
    assert loss == pytest.approx([2 + 0.05 * 0.25])
    assert grad == pytest.approx([-2 + 0.1 * 0.5])
    assert metrics["approx_kl"] == -0.5
    assert _run(LOSSES["dro"], [-50.0], [-1.0], [0.0])[1] == pytest.approx([-4.9])


def test_gpg_is_the_policy_gradient() -> None:
    loss, grad, metrics = _run(LOSSES["gpg"], [-1.0, -3.0], [0.0, 0.0], [2.0, -1.0])
    assert (loss, grad, metrics) == ([2.0, -3.0], [-2.0, 1.0], {"policy_loss": -0.5})


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_mask_leaves_out_reaches_nothing(name: str) -> None:
    loss, grad, metrics = _run(LOSSES[name], [-1.0, NAN, -0.9], [-1.1, NAN, -1.0], [1.0, NAN, 1.0], [1, 0, 1])
    short = _run(LOSSES[name], [-1.0, -0.9], [-1.1, -1.0], [1.0, 1.0])
    assert loss == pytest.approx([short[0][0], 0.0, short[0][1]])
    assert grad == pytest.approx([short[1][0], 0.0, short[1][1]])
    assert metrics == pytest.approx(short[2])


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_mask_gives_zeros(name: str) -> None:
    loss, grad, metrics = _run(LOSSES[name], [-1.0, -2.0], [-2.0, -1.0], [1.0, 1.0], [0, 0])
    assert loss == grad == [0.0, 0.0]
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize("name", ["gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_runaway_ratio_stays_finite(name: str, advantage: float) -> None:
    for new, old in ((-1e-3, -80.0), (-80.0, -1e-3)):
        loss, grad, _ = _run(LOSSES[name], [new], [old], [advantage])
        assert math.isfinite(loss[0])
        assert math.isfinite(grad[0])


def test_bad_input_is_refused() -> None:
    square = torch.zeros(2, 2)
    columns: tuple[Tensor, ...] = (square, square, square, square)
    for loss in (gspo_loss, cispo_loss, gmpo_loss, dppo_tv_loss, dppo_kl_loss):
        with pytest.raises(ConfigError, match="clip_low and clip_high must be 0 or more, given -0.1 and 0.2"):
            loss(*columns, clip_low=-0.1, clip_high=0.2)
        with pytest.raises(DataError, match=r"mask must have the shape of logprobs \(2, 2\), given \(2, 1\)"):
            loss(square, square, square, square[:, :1], clip_low=0.1, clip_high=0.2)
    with pytest.raises(ConfigError, match="tau_neg must be above 0, given 0"):
        sapo_loss(*columns, tau_pos=1.0, tau_neg=0.0)
    with pytest.raises(ConfigError, match="c must be above 0, given -1"):
        dppo_tv_loss(*columns, clip_low=0.1, clip_high=0.2, c=-1.0)
    with pytest.raises(ConfigError, match="beta must be 0 or more, given -0.5"):
        dro_loss(*columns, beta=-0.5)
    with pytest.raises(DataError, match="logprobs must have 2 dimension"):
        gpg_loss(square[0], square[0], square[0])
