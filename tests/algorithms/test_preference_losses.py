"""Losses over pairs (R32): goldens by hand, metrics, refusals; pairs out of groups of scored responses."""

import math

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.preference_losses import best_and_worst, dpo_loss, sequence_logprobs
from rlkit.errors import ConfigError, DataError

POLICY, REFERENCE, LENGTHS = (-10.0, -12.0), (-11.0, -11.5), (5, 3)
NAN = float("nan")


def _one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _r32(kind: str = "sigmoid", smoothing: float = 0.0, averaged: bool = False) -> tuple[float, dict[str, float]]:
    scale = LENGTHS if averaged else (1, 1)
    columns = [_one(number / scale[i % 2]) for i, number in enumerate((*POLICY, *REFERENCE))]
    loss, metrics = dpo_loss(*columns, beta=0.1, kind=kind, label_smoothing=smoothing)
    return loss.item(), {name: float(total) / int(count) for name, (total, count) in metrics.items()}


def test_r32_sigmoid() -> None:
    loss, metrics = _r32()
    assert loss == pytest.approx(0.6210, abs=1e-4)
    # h = (-10 + 11) - (-12 + 11.5) = 1.5
    assert metrics == pytest.approx(
        {"accuracy": 1.0, "margin": 0.15, "chosen_reward": 0.1, "rejected_reward": -0.05}, abs=1e-9
    )


def test_r32_label_smoothing_has_an_effect() -> None:
    assert _r32(smoothing=0.1)[0] == pytest.approx(0.6360, abs=1e-4)


def test_r32_length_normalised() -> None:
    loss, metrics = _r32(averaged=True)
    assert loss == pytest.approx(0.6750, abs=1e-4)
    assert metrics["margin"] / 0.1 == pytest.approx(0.36667, abs=1e-4)


def test_r32_ipo_of_sums_and_of_means() -> None:
    assert _r32("ipo")[0] == pytest.approx(12.25, abs=1e-4)
    assert _r32("ipo", averaged=True)[0] == pytest.approx(21.4678, abs=1e-4)


def test_hinge_by_hand() -> None:
    assert _r32("hinge")[0] == pytest.approx(1 - 0.15)
    loss, _ = dpo_loss(_one(20.0), _one(0.0), None, None, beta=0.1, kind="hinge")
    assert loss.item() == 0.0


def test_r32_smoothing_without_a_meaning_is_refused() -> None:
    for kind in ("ipo", "hinge"):
        with pytest.raises(
            ConfigError, match=f"label_smoothing has a meaning for 'sigmoid' only, given 0.1 with '{kind}'"
        ):
            _r32(kind, smoothing=0.1)
    for smoothing in (-0.1, 0.5):
        with pytest.raises(ConfigError, match="label_smoothing must be 0 or more and below 0.5"):
            _r32(smoothing=smoothing)


@pytest.mark.parametrize(("kind", "slope"), [("sigmoid", -0.1 / (1 + math.exp(0.15))), ("ipo", -7.0), ("hinge", -0.1)])
def test_gradients_by_hand(kind: str, slope: float) -> None:
    """Chosen goes up, rejected goes down by the same amount; the reference is a constant."""
    columns = [_one(number).requires_grad_() for number in (*POLICY, *REFERENCE)]
    loss, metrics = dpo_loss(*columns, beta=0.1, kind=kind)
    loss.sum().backward()
    chosen, rejected, *references = (column.grad for column in columns)
    assert chosen is not None
    assert rejected is not None
    assert (chosen.item(), rejected.item()) == (pytest.approx(slope), pytest.approx(-slope))
    assert references == [None, None]
    assert not any(total.requires_grad for total, _ in metrics.values())


def test_without_a_reference_the_policy_stands_alone() -> None:
    loss, metrics = dpo_loss(_one(-10.0), _one(-12.0), None, None, beta=0.1)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.2)))
    assert float(metrics["chosen_reward"][0]) == pytest.approx(-1.0)


def test_metrics_are_sums_and_counts() -> None:
    chosen, rejected = torch.tensor([-1.0, -5.0, -2.0]), torch.tensor([-2.0, -1.0, -2.0])
    _, metrics = dpo_loss(chosen, rejected, torch.zeros(3), torch.zeros(3), beta=0.5)
    assert {name: (float(total), int(count)) for name, (total, count) in metrics.items()} == {
        "accuracy": (1.0, 3),
        "margin": (-1.5, 3),
        "chosen_reward": (-4.0, 3),
        "rejected_reward": (-2.5, 3),
    }


def test_no_pairs_give_no_losses() -> None:
    none = torch.zeros(0, requires_grad=True)
    loss, metrics = dpo_loss(none, none, None, None, beta=0.1)
    loss.sum().backward()
    assert loss.shape == (0,)
    assert metrics["accuracy"][1] == 0


def test_an_extreme_margin_stays_finite() -> None:
    for margin in (1e4, -1e4):
        chosen = torch.tensor([margin], requires_grad=True)
        loss, _ = dpo_loss(chosen, torch.zeros(1), None, None, beta=1.0, label_smoothing=0.1)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert chosen.grad is not None
        assert chosen.grad.isfinite().all()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown preference loss 'kto'; expected one of sigmoid, ipo, hinge"):
        dpo_loss(_one(1), _one(1), None, None, beta=0.1, kind="kto")
    with pytest.raises(ConfigError, match="beta must be above 0, given 0"):
        dpo_loss(_one(1), _one(1), None, None, beta=0)
    with pytest.raises(DataError, match="for both responses or for neither"):
        dpo_loss(_one(1), _one(1), _one(1), None, beta=0.1)
    with pytest.raises(DataError, match=r"rejected must have the shape of chosen \(1,\), given \(2,\)"):
        dpo_loss(_one(1), torch.zeros(2), None, None, beta=0.1)
    with pytest.raises(DataError, match=r"reference must have the shape of logprobs \(1,\), given \(2,\)"):
        dpo_loss(_one(1), _one(1), torch.zeros(2), torch.zeros(2), beta=0.1)


def test_sequence_logprobs_by_hand() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, NAN], [NAN, -4.0, NAN], [NAN, NAN, NAN]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    assert sequence_logprobs(logprobs, mask, average=False).tolist() == [-3.0, -4.0, 0.0]
    average = sequence_logprobs(logprobs, mask, average=True)
    assert average.tolist() == [-1.5, -4.0, 0.0]
    average.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_best_and_worst_by_hand() -> None:
    rewards = torch.tensor([0.2, 5.0, 0.9, 1.0, 0.9, 0.1, 0.1])
    groups = torch.tensor([9, 4, 9, 4, 9, 9, 9])
    chosen, rejected = best_and_worst(rewards, groups)
    assert (chosen.tolist(), rejected.tolist()) == ([1, 2], [3, 6])


def test_groups_without_spread_give_no_pair() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.1, 0.1, 0.1, 7.0]), torch.tensor([0, 0, 1, 1, 1, 2])
    assert [rows.tolist() for rows in best_and_worst(rewards, groups)] == [[], []]
    assert [rows.tolist() for rows in best_and_worst(rewards, groups, ties="first")] == [[0, 2], [1, 4]]
    with pytest.raises(ConfigError, match="ties must be 'drop' or 'first', given 'both'"):
        best_and_worst(rewards, groups, ties="both")  # type: ignore[arg-type]


def test_rows_without_a_score_are_in_no_pair() -> None:
    rewards, groups = torch.tensor([NAN, 1.0, 0.0, 2.0, NAN]), torch.tensor([0, 0, 0, 1, 1])
    chosen, rejected = best_and_worst(rewards, groups, valid=~rewards.isnan())
    assert (chosen.tolist(), rejected.tolist()) == ([1], [2])
