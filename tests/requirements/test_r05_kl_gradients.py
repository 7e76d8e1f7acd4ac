"""R05: which gradient each KL option gives, by enumerating a three-token policy, and that a trainer is held by it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.kl import kl_estimate
from tests.trainers.toys import grpo, ppo

LOGITS = torch.tensor([0.2, -0.1, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64).log_softmax(0)
EXACT = [0.0530, -0.1923, 0.1393]
OTHER_DIRECTION = [0.0835, -0.2170, 0.1335]


def _gradient(objective: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Gradient of the expectation over tokens drawn from the policy, the drawing itself not differentiated."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    (logprobs.detach().exp() * objective(logprobs, REFERENCE)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def _close(given: Tensor, wanted: list[float]) -> None:
    torch.testing.assert_close(given, torch.tensor(wanted, dtype=torch.float64), atol=1e-4, rtol=0)


def test_r05_the_values_average_to_the_exact_kl() -> None:
    logprobs = LOGITS.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - REFERENCE)).sum()
    assert exact.item() == pytest.approx(0.1049, abs=1e-4)
    for kind in ("k1", "k3", "k1+", "k3+"):
        torch.testing.assert_close((logprobs.exp() * kl_estimate(logprobs, REFERENCE, kind)).sum(), exact)


def test_r05_k1_in_the_loss_holds_nothing() -> None:
    _close(_gradient(lambda p, q: kl_estimate(p, q, "k1")), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+", "abs+"])
def test_r05_unbiased_in_the_loss(kind: str) -> None:
    _close(_gradient(lambda p, q: kl_estimate(p, q, kind)), EXACT)


def test_r05_k1_in_the_reward_gives_the_exact_gradient() -> None:
    _close(_gradient(lambda p, q: kl_estimate(p, q, "k1").detach() * p), EXACT)


def test_r05_k3_and_k2_in_the_reward_give_a_difference_of_gradients() -> None:
    def gradient(objective: Callable[[Tensor], Tensor]) -> Tensor:
        logits = LOGITS.clone().requires_grad_()
        objective(logits.log_softmax(0)).backward()
        assert logits.grad is not None
        return logits.grad

    forward = gradient(lambda p: (p.exp() * (p - REFERENCE)).sum())
    backward = gradient(lambda p: (REFERENCE.exp() * (REFERENCE - p)).sum())
    square = gradient(lambda p: (p.exp() * (p - REFERENCE).square() / 2).sum())
    for kind, wanted in (("k3", forward - backward), ("k3+", forward - backward), ("k2", square - forward)):
        given = _gradient(lambda p, q, kind=kind: kl_estimate(p, q, kind).detach() * p)  # type: ignore[misc]
        torch.testing.assert_close(given, wanted)


def test_r05_k3_times_the_ratio_gives_the_exact_gradient() -> None:
    _close(_gradient(lambda p, q: (p - p.detach()).exp() * kl_estimate(p, q, "k3")), EXACT)


def test_r05_plain_k3_gives_the_other_direction() -> None:
    gradient = _gradient(lambda p, q: kl_estimate(p, q, "k3"))
    _close(gradient, OTHER_DIRECTION)
    logits = LOGITS.clone().requires_grad_()
    (REFERENCE.exp() * (REFERENCE - logits.log_softmax(0))).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(gradient, logits.grad)


def test_r05_abs_gives_the_gradient_of_twice_the_total_variation() -> None:
    logits = LOGITS.clone().requires_grad_()
    (logits.softmax(0) - REFERENCE.exp()).abs().sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(_gradient(lambda p, q: kl_estimate(p, q, "abs")), logits.grad)


def test_r05_a_step_against_the_gradient_moves_towards_the_reference() -> None:
    def distance(logits: Tensor) -> float:
        logprobs = logits.log_softmax(0)
        return float((logprobs.exp() * (logprobs - REFERENCE)).sum())

    for kind in ("k2", "k3", "k1+", "k3+"):
        step = LOGITS - 0.1 * _gradient(lambda p, q, kind=kind: kl_estimate(p, q, kind))  # type: ignore[misc]
        assert distance(step) < distance(LOGITS), kind


def test_r05_a_larger_kl_coefficient_holds_the_policy_nearer_to_the_reference() -> None:
    def distance(coef: float, build: Callable[..., Any]) -> float:
        trainer = build(reference=True, kl_coef=coef, batch_size=32, lr=1e-2, seed=3)
        for _ in range(20):
            metrics = trainer.step().metrics
        return metrics["kl/per_token"]

    for build in (ppo, grpo):
        free, held = distance(0.0, build), distance(1.0, build)
        assert held < 0.5 * free
