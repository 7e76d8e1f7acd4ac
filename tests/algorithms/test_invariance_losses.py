"""The losses beyond PPO's: no dependence on micro-batches, row order, padding width, padding side or precision."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from rlkit.algorithms.aggregation import token_weights
from rlkit.algorithms.correction import Correction, rollout_correction
from rlkit.algorithms.gradient_losses import dppo_kl_loss, dppo_tv_loss, dro_loss, gpg_loss
from rlkit.algorithms.policy_losses import LossMetrics
from rlkit.algorithms.preference_losses import dpo_loss, sequence_logprobs
from rlkit.algorithms.ratio_losses import cispo_loss, gmpo_loss, gspo_loss, sapo_loss
from tests.algorithms.test_invariance import LIMIT, MODES, Rollouts, _all_rows, _same, rollouts


def _gpg(logprobs: Tensor, _: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, LossMetrics]:
    return gpg_loss(logprobs, advantages, mask)


LOSSES: dict[str, Callable[..., tuple[Tensor, LossMetrics]]] = {
    "gspo": partial(gspo_loss, clip_low=0.1, clip_high=0.2),
    "cispo": partial(cispo_loss, clip_low=0.2, clip_high=0.3),
    "sapo": partial(sapo_loss, tau_pos=1.0, tau_neg=1.05),
    "gmpo": partial(gmpo_loss, clip_low=0.4, clip_high=0.4),
    "dppo_tv": partial(dppo_tv_loss, clip_low=0.2, clip_high=0.2),
    "dppo_kl": partial(dppo_kl_loss, clip_low=0.05, clip_high=0.05),
    "dro": partial(dro_loss, beta=0.1),
    "gpg": _gpg,
}
every_loss = pytest.mark.parametrize("name", LOSSES)
Learned = tuple[Tensor, Tensor, dict[str, Tensor]]


def _pool(pooled: dict[str, Tensor], metrics: LossMetrics) -> None:
    for name, (total, count) in metrics.items():
        assert not total.requires_grad
        pooled[name] = pooled.get(name, torch.zeros(2, dtype=torch.float64)) + torch.stack(
            [total.double(), count.double()]
        )


def _learn(data: Rollouts, name: str, mode: str, split: list[list[int]]) -> Learned:
    """Loss, its gradient (B, T) and pooled metrics of one update in the micro-batches of `split`."""
    old = -data.columns["old"].abs()
    logprobs = (old + 0.3 * data.columns["logprobs"]).clamp_max(0).requires_grad_()
    weights = token_weights(data.mask, mode, fixed_length=LIMIT, dtype=old.dtype)
    loss, pooled = torch.zeros((), dtype=old.dtype), dict[str, Tensor]()
    for rows in split:
        columns = logprobs[rows], old[rows], data.columns["values"][rows], data.mask[rows]
        token_loss, metrics = LOSSES[name](*columns)
        part = (token_loss * weights[rows]).sum()
        part.backward()
        loss = loss + part.detach()
        _pool(pooled, metrics)
    assert logprobs.grad is not None
    return loss, logprobs.grad, pooled


@every_loss
@settings(max_examples=20, deadline=None)
@given(data=rollouts(), mode=st.sampled_from(MODES), cuts=st.data())
def test_any_split_in_any_order_gives_the_same_update(
    name: str, data: Rollouts, mode: str, cuts: st.DataObject
) -> None:
    order = cuts.draw(st.permutations(range(len(data.mask))))
    edges = sorted(cuts.draw(st.lists(st.integers(0, len(order)), max_size=4)))
    split = [list(order[a:b]) for a, b in zip([0, *edges], [*edges, len(order)], strict=True)]
    whole = _learn(data, name, mode, _all_rows(data))
    _same(_learn(data, name, mode, split), whole)
    moved = _learn(data.rows(list(order)), name, mode, _all_rows(data))
    _same(moved, (whole[0], whole[1][list(order)], whole[2]))


@every_loss
@settings(max_examples=20, deadline=None)
@given(
    data=rollouts(),
    mode=st.sampled_from(MODES),
    left=st.integers(0, 4),
    right=st.integers(0, 50),
    junk=st.sampled_from([0.0, 3.0, float("nan"), float("inf")]),
)
def test_padding_does_not_matter(name: str, data: Rollouts, mode: str, left: int, right: int, junk: float) -> None:
    loss, gradient, metrics = _learn(data, name, mode, _all_rows(data))
    wide_loss, wide_gradient, wide_metrics = _learn(data.padded(left, right, junk), name, mode, _all_rows(data))
    _same((wide_loss, wide_metrics), (loss, metrics))
    _same(torch.where(pad(data.mask, (left, right)), wide_gradient, 0.0), pad(gradient, (left, right)))


def _right_aligned(data: Rollouts) -> tuple[Rollouts, Tensor]:
    width, lengths = data.mask.shape[1], data.mask.sum(1)
    source = (torch.arange(width) + lengths[:, None]) % width
    columns = {n: x if n == "rewards" else x.gather(1, source) for n, x in data.columns.items()}
    return Rollouts(data.mask.gather(1, source), columns), source


@every_loss
@settings(max_examples=15, deadline=None)
@given(data=rollouts(), mode=st.sampled_from(MODES))
def test_left_and_right_padded_rows_learn_the_same(name: str, data: Rollouts, mode: str) -> None:
    shifted, source = _right_aligned(data)
    loss, gradient, metrics = _learn(data, name, mode, _all_rows(data))
    _same(_learn(shifted, name, mode, _all_rows(data)), (loss, gradient.gather(1, source), metrics))


@every_loss
@settings(max_examples=15, deadline=None)
@given(data=rollouts())
def test_single_precision_gives_the_same_to_its_accuracy(name: str, data: Rollouts) -> None:
    single = Rollouts(data.mask, {n: x.float() for n, x in data.columns.items()})
    wanted_loss, wanted_gradient, _ = _learn(data, name, "token-mean", _all_rows(data))
    loss, gradient, _ = _learn(single, name, "token-mean", _all_rows(data))
    assert loss.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted_loss, atol=1e-4, rtol=1e-4)
    close = (gradient.double() - wanted_gradient).abs() <= 1e-4
    assert close.float().mean() >= 0.99  # a ratio may fall on the other side of a bound


@pytest.mark.parametrize("average", [False, True])
@settings(max_examples=30, deadline=None)
@given(data=rollouts(), left=st.integers(0, 4), right=st.integers(0, 20), kind=st.sampled_from(["sigmoid", "ipo"]))
def test_r32_preference_losses_do_not_see_the_padding(
    average: bool, data: Rollouts, left: int, right: int, kind: str
) -> None:
    def learn(data: Rollouts, split: list[list[int]]) -> Learned:
        chosen = data.columns["logprobs"].clone().requires_grad_()
        pooled: dict[str, Tensor] = {}
        loss = torch.zeros((), dtype=torch.float64)
        for rows in split:
            columns = (chosen, *(data.columns[name] for name in ("old", "reference", "values")))
            scores = [sequence_logprobs(column[rows], data.mask[rows], average) for column in columns]
            pair_loss, metrics = dpo_loss(*scores, beta=0.3, kind=kind)
            part = pair_loss.sum() / len(data.mask)
            part.backward()
            loss = loss + part.detach()
            _pool(pooled, metrics)
        assert chosen.grad is not None
        return loss, chosen.grad, pooled

    whole = learn(data, _all_rows(data))
    _same(learn(data, [[row] for row in range(len(data.mask))]), whole)
    loss, gradient, metrics = learn(data.padded(left, right, float("nan")), _all_rows(data))
    _same((loss, metrics), (whole[0], whole[2]))
    _same(torch.where(pad(data.mask, (left, right)), gradient, 0.0), pad(whole[1], (left, right)))
    shifted, source = _right_aligned(data)
    _same(learn(shifted, _all_rows(data)), (whole[0], whole[1].gather(1, source), whole[2]))


CORRECTIONS: list[dict[str, Any]] = [
    {"weights": "token", "threshold": 1.5},
    {"weights": "sequence", "icepop": (0.5, 2.0)},
    {"weights": "token", "icepop": (0.5, 2.0), "rejection": "token", "rejection_band": (0.4, 2.5)},
    {"rejection": "sequence-mean", "rejection_kind": "k3", "rejection_limit": 0.1},
    {"weights": "sequence", "rejection": "sequence-max", "rejection_kind": "k2", "rejection_limit": 0.3},
    {"rejection": "sequence-sum", "rejection_band": (0.5, 2.0)},
]


@pytest.mark.parametrize("options", CORRECTIONS)
@settings(max_examples=15, deadline=None)
@given(data=rollouts(), left=st.integers(0, 4), right=st.integers(0, 20))
def test_rollout_correction_is_row_by_row(options: dict[str, Any], data: Rollouts, left: int, right: int) -> None:
    def correct(data: Rollouts, rows: list[int]) -> Correction:
        old, gap = data.columns["old"][rows], 0.4 * data.columns["logprobs"][rows]
        return rollout_correction(old, old + gap, data.mask[rows], **options)

    whole, parts = correct(data, _all_rows(data)[0]), [correct(data, [row]) for row in range(len(data.mask))]
    _same(torch.cat([part.weights for part in parts]), whole.weights)
    assert torch.equal(torch.cat([part.mask for part in parts]), whole.mask)
    pooled, wanted = dict[str, Tensor](), dict[str, Tensor]()
    for part in parts:
        _pool(pooled, part.metrics)
    _pool(wanted, whole.metrics)
    _same(pooled, wanted)
    wide, again = correct(data.padded(left, right, float("nan")), _all_rows(data)[0]), dict[str, Tensor]()
    _pool(again, wide.metrics)
    _same((wide.weights, again), (pad(whole.weights, (left, right)), wanted))
    assert torch.equal(wide.mask, pad(whole.mask, (left, right)))
    assert not (whole.mask & ~data.mask).any()
