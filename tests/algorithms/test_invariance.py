"""Losses, gradients and metrics do not depend on micro-batches, row order, padding width or padding side."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from rlkit.algorithms.advantages import gae, place_rewards
from rlkit.algorithms.aggregation import token_weights
from rlkit.algorithms.kl import kl_estimate
from rlkit.algorithms.masked import masked_whiten
from rlkit.algorithms.policy_losses import ppo_clip_loss
from rlkit.algorithms.value_losses import clipped_value_loss

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LIMIT = 12
COLUMNS = ("logprobs", "old", "reference", "values", "old_values")


@dataclass(frozen=True)
class Rollouts:
    """Random rollouts: `mask` (B, T) and the columns (B, T) by name, rewards (B,) under "rewards"."""

    mask: Tensor
    columns: dict[str, Tensor]

    def padded(self, left: int, right: int, junk: float) -> "Rollouts":
        """Wider, with junk in the new cells."""
        wide = {n: x if n == "rewards" else pad(x, (left, right), value=junk) for n, x in self.columns.items()}
        return replace(self, mask=pad(self.mask, (left, right)), columns=wide)

    def rows(self, rows: list[int]) -> "Rollouts":
        return Rollouts(self.mask[rows], {name: column[rows] for name, column in self.columns.items()})


@st.composite
def rollouts(draw: Any) -> Rollouts:
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.arange(max(*lengths, 1)) < torch.tensor(lengths)[:, None]
    columns = {name: torch.randn(mask.shape, generator=rng, dtype=torch.float64) for name in COLUMNS}
    columns["rewards"] = torch.randn(len(lengths), generator=rng, dtype=torch.float64)
    return Rollouts(mask, columns)


def _learn(data: Rollouts, mode: str, split: list[list[int]]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """One update's loss, gradients (B, T) per differentiated column, and metrics, made as a trainer makes them."""
    mask, columns = data.mask, data.columns
    kl = kl_estimate(columns["old"], columns["reference"], "k1")
    token_rewards = place_rewards(columns["rewards"], mask, kl, 0.1)
    advantages, returns = gae(token_rewards, columns["old_values"], mask, 0.97, 0.9)
    advantages = masked_whiten(advantages, mask)
    weights = token_weights(mask, mode, fixed_length=LIMIT, dtype=torch.float64)
    learned = {name: columns[name].clone().requires_grad_() for name in ("logprobs", "values")}
    loss = torch.zeros((), dtype=torch.float64)
    pooled: dict[str, Tensor] = {}
    for rows in split:
        logprobs, values = learned["logprobs"][rows], learned["values"][rows]
        policy, metrics = ppo_clip_loss(logprobs, columns["old"][rows], advantages[rows], mask[rows], 0.2, 0.3, 2.0)
        value, more = clipped_value_loss(values, columns["old_values"][rows], returns[rows], mask[rows], 0.2)
        holding = torch.where(mask[rows], kl_estimate(logprobs, columns["reference"][rows], "k3+"), 0.0)
        part = ((policy + 0.5 * value + 0.1 * holding) * weights[rows]).sum()
        part.backward()
        loss = loss + part.detach()
        for name, (total, count) in (metrics | more).items():
            pooled[name] = pooled.get(name, torch.zeros(2, dtype=torch.float64)) + torch.stack(
                [total.double(), count.double()]
            )
    gradients = {name: column.grad for name, column in learned.items() if column.grad is not None}
    return loss, gradients, pooled


def _same(given: Any, wanted: Any) -> None:
    torch.testing.assert_close(given, wanted, atol=1e-10, rtol=1e-9)


def _all_rows(data: Rollouts) -> list[list[int]]:
    return [list(range(len(data.mask)))]


@settings(max_examples=60, deadline=None)
@given(data=rollouts(), mode=st.sampled_from(MODES), cuts=st.data())
def test_any_split_in_any_order_gives_the_same_update(data: Rollouts, mode: str, cuts: st.DataObject) -> None:
    order = cuts.draw(st.permutations(range(len(data.mask))))
    edges = sorted(cuts.draw(st.lists(st.integers(0, len(order)), max_size=4)))
    split = [list(order[a:b]) for a, b in zip([0, *edges], [*edges, len(order)], strict=True)]
    _same(_learn(data, mode, split), _learn(data, mode, _all_rows(data)))


@settings(max_examples=60, deadline=None)
@given(data=rollouts(), mode=st.sampled_from(MODES), order=st.randoms(use_true_random=False))
def test_row_order_does_not_matter(data: Rollouts, mode: str, order: Any) -> None:
    rows = list(range(len(data.mask)))
    order.shuffle(rows)
    loss, gradients, metrics = _learn(data, mode, _all_rows(data))
    moved = _learn(data.rows(rows), mode, _all_rows(data))
    _same(moved, (loss, {name: gradient[rows] for name, gradient in gradients.items()}, metrics))


@settings(max_examples=80, deadline=None)
@given(
    data=rollouts(),
    mode=st.sampled_from(MODES),
    left=st.integers(0, 4),
    right=st.integers(0, 50),
    junk=st.sampled_from([0.0, 3.0, float("nan"), float("inf")]),
)
def test_padding_does_not_matter(data: Rollouts, mode: str, left: int, right: int, junk: float) -> None:
    loss, gradients, metrics = _learn(data, mode, _all_rows(data))
    wide_loss, wide_gradients, wide_metrics = _learn(data.padded(left, right, junk), mode, _all_rows(data))
    _same((wide_loss, wide_metrics), (loss, metrics))
    for name, gradient in gradients.items():
        mask = pad(data.mask, (left, right))
        _same(torch.where(mask, wide_gradients[name], 0.0), pad(gradient, (left, right)))


@settings(max_examples=40, deadline=None)
@given(data=rollouts(), mode=st.sampled_from(MODES))
def test_left_and_right_padded_rows_learn_the_same(data: Rollouts, mode: str) -> None:
    width, lengths = data.mask.shape[1], data.mask.sum(1)
    source = (torch.arange(width) + lengths[:, None]) % width  # right-aligned: cell t takes cell t - (width - length)
    shifted = Rollouts(
        data.mask.gather(1, source),
        {n: x if n == "rewards" else x.gather(1, source) for n, x in data.columns.items()},
    )
    assert bool((shifted.mask == data.mask.flip(1)).all())
    loss, gradients, metrics = _learn(data, mode, _all_rows(data))
    _same(
        _learn(shifted, mode, _all_rows(data)),
        (loss, {name: gradient.gather(1, source) for name, gradient in gradients.items()}, metrics),
    )
