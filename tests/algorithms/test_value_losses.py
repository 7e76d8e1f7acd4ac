"""The critic's loss: goldens by hand, the unclipped form, metrics."""

import pytest
import torch

from rlkit.algorithms.value_losses import clipped_value_loss
from rlkit.errors import ConfigError

ONES = torch.ones(1, 4)


def test_by_hand() -> None:
    values = torch.tensor([[1.5, 0.9, 3.0, 0.0]], requires_grad=True)
    old, returns = torch.tensor([[1.0, 1.0, 1.0, 1.0]]), torch.tensor([[2.0, 0.0, 1.0, 0.0]])
    token_loss, metrics = clipped_value_loss(values, old, returns, ONES, 0.2)
    token_loss.sum().backward()
    # Held values: 1.2, 0.9, 1.2, 0.8. The larger error counts.
    assert token_loss[0].tolist() == pytest.approx([0.64 / 2, 0.81 / 2, 4.0 / 2, 0.64 / 2])
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([0.0, 0.9, 2.0, 0.0])
    assert {name: float(total) / int(count) for name, (total, count) in metrics.items()} == pytest.approx(
        {"value_clip_fraction": 0.5, "value_outside_fraction": 0.75, "value_loss": (0.64 + 0.81 + 4.0 + 0.64) / 8}
    )


def test_r23_the_outside_fraction_looks_at_the_change_before_clipping() -> None:
    change = torch.tensor([[0.1, 0.3, -0.5, 0.05]])
    _, metrics = clipped_value_loss(change, torch.zeros(1, 4), torch.zeros(1, 4), ONES, 0.2)
    total, count = metrics["value_outside_fraction"]
    assert float(total) / int(count) == 0.5


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    values, returns = torch.tensor([[3.0, -1.0, 0.0, 9.0]]), torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    token_loss, metrics = clipped_value_loss(
        values, torch.full((1, 4), 50.0), returns, torch.tensor([[1, 1, 1, 0]]), None
    )
    assert token_loss.tolist() == [[2.0, 2.0, 0.0, 0.0]]
    assert metrics["value_clip_fraction"][0] == metrics["value_outside_fraction"][0] == 0


def test_what_the_mask_leaves_out_reaches_nothing() -> None:
    values = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    wild = torch.tensor([[0.0, float("inf")]])
    token_loss, _ = clipped_value_loss(values, wild, wild, torch.tensor([[1, 0]]), 0.5)
    token_loss.sum().backward()
    assert values.grad is not None
    assert token_loss.tolist() == [[0.5, 0.0]]
    assert values.grad.tolist() == [[1.0, 0.0]]


def test_a_clip_that_allows_no_change_is_refused() -> None:
    with pytest.raises(ConfigError, match="value clip must be above 0 or None, given 0"):
        clipped_value_loss(ONES, ONES, ONES, ONES, 0.0)
