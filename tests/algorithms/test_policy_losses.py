"""PPO's clipped loss: goldens by hand, gradients at the corners, metrics."""

import math

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.policy_losses import ppo_clip_loss
from rlkit.errors import ConfigError, DataError


def _loss(
    ratios: list[float], advantages: list[float], mask: list[int] | None = None, **options: float | None
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Token loss (T,), its gradient with respect to the log-probs, and metrics as means."""
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    kept = torch.ones_like(logprobs) if mask is None else torch.tensor([mask])
    settings: dict[str, float | None] = {"clip_low": 0.2, "clip_high": 0.2, **options}
    token_loss, metrics = ppo_clip_loss(
        logprobs,
        torch.zeros_like(logprobs),
        torch.tensor([advantages], dtype=torch.float64),
        kept,
        **settings,  # type: ignore[arg-type]
    )
    token_loss.sum().backward()
    assert logprobs.grad is not None
    assert not any(total.requires_grad for total, _ in metrics.values())
    means = {name: float(total) / max(int(count), 1) for name, (total, count) in metrics.items()}
    return token_loss.detach()[0], logprobs.grad[0], means


def test_the_four_corners() -> None:
    loss, grad, metrics = _loss([0.5, 1.5, 0.5, 1.5], [1.0, 1.0, -1.0, -1.0])
    assert loss.tolist() == pytest.approx([-0.5, -1.2, 0.8, 1.5])
    assert grad.tolist() == pytest.approx([-0.5, 0.0, 0.0, 1.5])
    assert metrics["ratio_outside_fraction"] == 1.0
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["approx_kl"] == pytest.approx(-(math.log(0.5) + math.log(1.5)) / 2)
    assert metrics["policy_loss"] == pytest.approx((-0.5 - 1.2 + 0.8 + 1.5) / 4)


def test_inside_the_bounds_the_gradient_is_the_policy_gradient() -> None:
    loss, grad, metrics = _loss([1.0, 1.1], [2.0, -3.0])
    assert loss.tolist() == pytest.approx([-2.0, 3.3])
    assert grad.tolist() == pytest.approx([-2.0, 3.3])
    assert metrics["clip_fraction"] == metrics["ratio_outside_fraction"] == 0.0


def test_clip_higher_lets_good_tokens_rise_further() -> None:
    for high, gradient in ((0.2, 0.0), (0.28, -1.25)):
        _, grad, _ = _loss([1.25], [1.0], clip_high=high)
        assert grad.item() == pytest.approx(gradient)


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    loss, grad, metrics = _loss([4.0, 4.0, 2.0], [-1.0, 1.0, -1.0], dual_clip=3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert grad.tolist() == pytest.approx([0.0, 0.0, 2.0])
    assert metrics["dual_clip_fraction"] == pytest.approx(1 / 3)
    loss, grad, metrics = _loss([4.0], [-1.0])
    assert loss.item() == grad.item() == pytest.approx(4.0)
    assert metrics["dual_clip_fraction"] == 0.0


def test_a_runaway_ratio_stays_finite() -> None:
    loss, grad, _ = _loss([math.exp(60)], [-1.0])
    assert loss.item() == pytest.approx(math.exp(20))
    assert grad.item() == 0.0


def test_what_the_mask_leaves_out_reaches_nothing() -> None:
    nan = float("nan")
    loss, grad, metrics = _loss([1.1, nan, 0.9], [1.0, nan, 2.0], mask=[1, 0, 1])
    assert loss.tolist() == pytest.approx([-1.1, 0.0, -1.8])
    assert grad.tolist() == pytest.approx([-1.1, 0.0, -1.8])
    assert metrics["ratio_mean"] == pytest.approx(1.0)


def test_an_empty_mask_gives_zero_and_a_zero_count() -> None:
    loss, grad, metrics = _loss([1.5, 0.5], [1.0, 1.0], mask=[0, 0])
    assert loss.tolist() == grad.tolist() == [0.0, 0.0]
    assert set(metrics.values()) == {0.0}


def test_only_the_new_logprobs_are_differentiated() -> None:
    new, old, advantages = (torch.ones(1, 2, requires_grad=True) for _ in range(3))
    token_loss, _ = ppo_clip_loss(new, old, advantages, torch.ones(1, 2), 0.2, 0.2)
    token_loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[-1.0, -1.0]]
    assert old.grad is None
    assert advantages.grad is None


def test_bad_input_is_refused() -> None:
    square = torch.zeros(2, 2)
    with pytest.raises(ConfigError, match="dual_clip must be above 1"):
        ppo_clip_loss(square, square, square, square, 0.2, 0.2, dual_clip=1.0)
    with pytest.raises(DataError, match=r"advantages must have the shape of logprobs \(2, 2\), given \(2, 1\)"):
        ppo_clip_loss(square, square, square[:, :1], square, 0.2, 0.2)
    with pytest.raises(DataError, match=r"logprobs must have 2 dimension\(s\), given shape \(2,\)"):
        ppo_clip_loss(square[0], square[0], square[0], square[0], 0.2, 0.2)
