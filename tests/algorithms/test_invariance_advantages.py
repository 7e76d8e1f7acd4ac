"""Advantages: no dependence on row order or padding width, finite on ragged groups, groups of one and empty rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from rlkit.algorithms.advantages import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    passk_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)

Rows = dict[str, Tensor]
NAN = float("nan")

METHODS: dict[str, Callable[[Rows], Tensor]] = {
    "group": lambda r: group_advantages(r["rewards"], r["groups"], valid=r["valid"]),
    "dr_grpo": lambda r: group_advantages(r["rewards"], r["groups"], False, singleton="raw", valid=r["valid"]),
    "rloo": lambda r: rloo_advantages(r["rewards"], r["groups"], r["valid"]),
    "rloo_raw": lambda r: rloo_advantages(r["rewards"], r["groups"], r["valid"], "raw"),
    "gpg": lambda r: gpg_advantages(r["rewards"], r["groups"], r["valid"]),
    "gpg_nonzero": lambda r: gpg_advantages(r["rewards"], r["groups"], r["valid"], "raw", "nonzero"),
    "passk": lambda r: passk_advantages(r["rewards"], r["groups"], r["valid"]),
    "baseline": lambda r: reinforce_plus_plus_baseline_advantages(r["rewards"], r["groups"], r["mask"], r["valid"]),
    "reinforce++": lambda r: reinforce_plus_plus_advantages(r["token_rewards"], r["mask"], 0.97)[0],
    "remax": lambda r: remax_advantages(r["token_rewards"], r["baselines"], r["mask"])[0],
    "gdpo": lambda r: _gdpo(r, True),
    "gdpo_plain": lambda r: _gdpo(r, False),
}
every_method = pytest.mark.parametrize("name", METHODS)


def _gdpo(rows: Rows, whiten: bool) -> Tensor:
    terms, weights = {"a": rows["rewards"], "b": rows["other"]}, {"a": 1.0, "b": 0.5}
    return gdpo_advantages(terms, weights, rows["groups"], rows["mask"], whiten=whiten, valid=rows["valid"])


@st.composite
def batches(draw: Any) -> Rows:
    """Ragged groups in any order, some rows without tokens, some left out, one reward term that may abstain."""
    count = draw(st.integers(1, 10))
    number = st.sampled_from([-1.5, 0.0, 0.0, 0.25, 1.0, 1.0, 2.0])

    def column(values: Any) -> list[Any]:
        drawn: list[Any] = draw(st.lists(values, min_size=count, max_size=count))
        return drawn

    mask = torch.arange(6) < torch.tensor(column(st.integers(0, 6)))[:, None]
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return {
        "rewards": torch.tensor(column(number), dtype=torch.float64),
        "other": torch.tensor(column(number | st.just(NAN)), dtype=torch.float64),
        "groups": torch.tensor(column(st.integers(-2, 2))),
        "valid": torch.tensor(column(st.sampled_from([True, True, True, False]))),
        "mask": mask,
        "token_rewards": torch.randn(count, 6, generator=rng, dtype=torch.float64),
        "baselines": torch.randn(count, generator=rng, dtype=torch.float64),
    }


def _padded(rows: Rows, left: int, right: int) -> Rows:
    junk = {"mask": 0.0, "token_rewards": NAN}
    return {n: pad(x, (left, right), value=junk[n]) if x.ndim == 2 else x for n, x in rows.items()}


@every_method
@settings(max_examples=50, deadline=None)
@given(rows=batches(), left=st.integers(0, 3), right=st.integers(0, 50), order=st.randoms(use_true_random=False))
def test_row_order_and_padding_do_not_matter(name: str, rows: Rows, left: int, right: int, order: Any) -> None:
    advantages = METHODS[name](rows)
    assert advantages.isfinite().all()
    shuffled = list(range(len(advantages)))
    order.shuffle(shuffled)
    moved = METHODS[name]({column: values[shuffled] for column, values in rows.items()})
    torch.testing.assert_close(moved, advantages[shuffled], atol=1e-10, rtol=1e-8)
    wide = METHODS[name](_padded(rows, left, right))
    wanted = pad(advantages, (left, right)) if advantages.ndim == 2 else advantages
    torch.testing.assert_close(wide, wanted, atol=1e-10, rtol=1e-8)


@every_method
@settings(max_examples=30, deadline=None)
@given(rows=batches())
def test_rows_that_do_not_count_get_zero_and_change_nothing(name: str, rows: Rows) -> None:
    if name in ("reinforce++", "remax"):
        return
    advantages = METHODS[name](rows)
    assert not advantages[~rows["valid"]].any()
    if advantages.ndim == 2:
        assert not advantages[~rows["mask"]].any()
    alone = METHODS[name]({column: values[rows["valid"]] for column, values in rows.items()})
    torch.testing.assert_close(advantages[rows["valid"]], alone, atol=1e-10, rtol=1e-8)
    poisoned = rows | {"rewards": torch.where(rows["valid"], rows["rewards"], NAN)}
    torch.testing.assert_close(METHODS[name](poisoned), advantages, atol=1e-10, rtol=1e-8)


@every_method
@settings(max_examples=20, deadline=None)
@given(rows=batches())
def test_single_precision_gives_the_same_to_its_accuracy(name: str, rows: Rows) -> None:
    single = {n: x.float() if x.dtype == torch.float64 else x for n, x in rows.items()}
    advantages = METHODS[name](single)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages.double(), METHODS[name](rows), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["group", "dr_grpo", "rloo", "gpg", "passk", "baseline", "gdpo", "gdpo_plain"])
@pytest.mark.parametrize("reward", [0.1, 1.0, -1e-3, 1e4])
def test_groups_without_spread_give_exact_zeros_everywhere(name: str, dtype: torch.dtype, reward: float) -> None:
    rewards = torch.full((7,), reward, dtype=dtype)
    everyone = torch.ones(7, dtype=torch.bool)
    groups, mask = torch.tensor([0, 0, 0, 5, 5, 5, 9]), torch.ones(7, 3, dtype=torch.bool)
    rows = {"rewards": rewards, "other": rewards, "groups": groups, "mask": mask, "valid": everyone}
    rows["rewards"] = rewards.clone()
    if name == "dr_grpo":
        rows["rewards"][6] = 0.0  # alone in its group, it keeps its own reward there
    assert not METHODS[name](rows).any()
