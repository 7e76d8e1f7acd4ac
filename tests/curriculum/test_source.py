"""Curricula: what is declared, which pools are drawn, and what pass rates say."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.curriculum import Curriculum, CurriculumSource, Ramp, Stage, Steps
from rlkit.curriculum.mixture import draw
from rlkit.data import PromptSource
from rlkit.errors import ConfigError, DataError
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
POOLS = {"easy": [f"good w{i}" for i in range(5)], "hard": [f"bad w{i}" for i in range(7)]}
TWO = [Stage("first", {"easy": 1.0}, until=Steps(3)), Stage("both", {"easy": 1, "hard": 3})]


def _open(stages: Any = TWO, pools: Any = POOLS, seed: int = 0, **options: Any) -> CurriculumSource:
    return Curriculum(pools, stages, **options).open(TOKENIZER, seed, 16)


def _shares(source: CurriculumSource) -> list[float]:
    return [source.metrics()[f"curriculum/{pool}_share"] for pool in source.pools]


def _drawn(source: CurriculumSource, n: int) -> list[str]:
    return [row.columns["pool"] for row in source.next(n)]


# Rows


def test_rows_know_their_pool_and_have_an_index_of_their_own() -> None:
    pools = {"easy": [{"prompt": "good w1", "answer": 4}, {"prompt": "good w2", "answer": 5}], "hard": ["bad w1"]}
    source = _open([Stage("all", {"easy": 1, "hard": 1})], pools)
    assert len(source) == 3
    assert [(row.index, row.text, row.columns) for row in source.rows] == [
        (0, "good w1", {"answer": 4, "pool": "easy"}),
        (1, "good w2", {"answer": 5, "pool": "easy"}),
        (2, "bad w1", {"answer": None, "pool": "hard"}),
    ]
    for row in source.next(40):
        assert row == source.rows[row.index]
        assert row.ids == TOKENIZER(row.text)["input_ids"]


def test_one_pool_alone_is_a_prompt_source() -> None:
    source = _open([Stage("all", {"easy": 1})], {"easy": POOLS["easy"]})
    plain = PromptSource(POOLS["easy"], TOKENIZER, int(np.random.SeedSequence([0, 0]).generate_state(1)[0]), 16)
    assert [row.text for row in source.next(13)] == [row.text for row in plain.next(13)]


def test_the_seed_decides_pools_and_orders() -> None:
    first, same, other = (_open(TWO[1:], seed=seed) for seed in (4, 4, 5))
    drawn = [[row.index for row in source.next(30)] for source in (first, same, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert first.fingerprint == other.fingerprint
    assert first.fingerprint != _open(TWO[1:], {**POOLS, "hard": ["bad w1"]}).fingerprint


def test_pools_of_one_size_are_not_shuffled_alike() -> None:
    source = _open([Stage("all", {"a": 1, "b": 1})], {name: [f"w{i}" for i in range(16)] for name in "ab"})
    orders: dict[str, list[str]] = {"a": [], "b": []}
    for row in source.next(200):
        orders[row.columns["pool"]].append(row.text)
    assert orders["a"][:16] != orders["b"][:16]
    assert sorted(orders["a"][:16]) == sorted(orders["b"][:16])


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 999),
    pieces=st.lists(st.integers(1, 30), min_size=1, max_size=6),
)
def test_every_epoch_of_a_pool_visits_each_prompt_once(sizes: list[int], seed: int, pieces: list[int]) -> None:
    pools = {f"p{k}": [f"w{k} w{i}" for i in range(size)] for k, size in enumerate(sizes)}
    source = _open([Stage("all", dict.fromkeys(pools, 1.0))], pools, seed)
    seen: dict[str, list[int]] = {pool: [] for pool in pools}
    for n in pieces:
        for row in source.next(n):
            seen[row.columns["pool"]].append(row.index)
    start = 0
    for pool, size in zip(pools, sizes, strict=True):
        for epoch in range(0, len(seen[pool]) // size * size, size):
            assert sorted(seen[pool][epoch : epoch + size]) == list(range(start, start + size))
        start += size


# Mixtures


@settings(max_examples=25, deadline=None)
@given(weights=st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any), seed=st.integers(0, 9999))
def test_shares_of_what_is_drawn_converge_to_the_weights(weights: list[int], seed: int) -> None:
    mixture = {f"p{k}": weight for k, weight in enumerate(weights)}
    source = _open([Stage("all", mixture)], {pool: ["the film", "a day"] for pool in mixture}, seed)
    n = 2000
    counts = Counter(_drawn(source, n))
    for pool, weight in mixture.items():
        share = weight / sum(weights)
        assert source.metrics()[f"curriculum/{pool}_share"] == pytest.approx(share)
        # Five standard deviations of a binomial: less than one false alarm in a million.
        assert abs(counts[pool] - n * share) <= 5 * math.sqrt(n * share * (1 - share))


def test_a_ramp_is_counted_from_entering_its_stage() -> None:
    stages = [
        Stage("first", {"easy": 1}, until=Steps(2)),
        Stage("rise", {"easy": Ramp(3, 1, 4), "hard": Ramp(0, 1, 4)}),
    ]
    source = _open(stages)
    shares = [_shares(source)]
    for step in range(1, 8):
        source.observe(step, {}, [], [])
        shares.append(_shares(source))
    # Weights in "rise": (3, 0) (2.5, .25) (2, .5) (1.5, .75) (1, 1), and so on.
    expected = [0, 0, 0, 0.25 / 2.75, 0.5 / 2.5, 0.75 / 2.25, 0.5, 0.5]
    assert [hard for _, hard in shares] == pytest.approx(expected)
    assert Ramp(0.2, 0.6, 4).at(0) == 0.2
    assert Ramp(0.2, 0.6, 4).at(1) == pytest.approx(0.3)


def test_by_pass_rate_prefers_what_is_neither_solved_nor_hopeless() -> None:
    pools = {name: ["the film"] for name in ("solved", "even", "hopeless", "unknown")}
    source = _open([Stage("all", "by_pass_rate")], pools, pass_floor=0.05)
    assert _shares(source) == pytest.approx([0.25] * 4)
    source.observe(1, {}, [0] * 4 + [1] * 4 + [2] * 4, [1, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0])
    # p (1 - p) + 0.05 with p = 1, 1/2, 0 and, unknown, 1/2.
    weights = [0.05, 0.3, 0.05, 0.3]
    assert _shares(source) == pytest.approx([w / 0.7 for w in weights])
    assert source.settings()["pool_weights"] == pytest.approx(dict(zip(pools, weights, strict=True)))


def test_a_pool_of_weight_zero_is_never_drawn() -> None:
    # The smallest weight there is: half of all numbers below 1, times it, round up to it.
    source = _open([Stage("all", {"b": 5e-324})], {name: ["the film"] for name in "abc"})
    assert set(_drawn(source, 300)) == {"b"}


class Drawn(np.random.Generator):
    """A generator whose numbers are given."""

    def random(self, *_: Any, **__: Any) -> Any:
        return np.array([0.0, 0.2499, 0.25, 1.0 - 2.0**-53])


def test_the_draw_by_hand() -> None:
    weights = {"a": 0.0, "b": 0.5, "c": 0.0, "d": 1.5, "e": 0.0}
    assert draw(Drawn(np.random.PCG64()), weights, 4) == ["b", "b", "d", "d"]


# Pass rates


def test_pass_rates_by_hand() -> None:
    source = _open(pass_at=0.5, pass_decay=0.5)
    source.observe(1, {}, [0, 4, 5, 6], [0.5, 0.4, math.nan, None])
    # easy: one of two passes, so the rate is a half; hard abstained.
    assert source.metrics()["curriculum/easy_pass_rate"] == pytest.approx(0.5)
    assert "curriculum/hard_pass_rate" not in source.metrics()
    source.observe(2, {}, [1, 6], [0.9, -1.0])
    # easy: what was there weighs 1 - 1/4 = 3/4 and now half of that; the new rollout weighs a half.
    assert source.metrics()["curriculum/easy_pass_rate"] == pytest.approx((0.375 * 0.5 + 0.5 * 1) / 0.875)
    assert source.metrics()["curriculum/hard_pass_rate"] == 0.0


@settings(max_examples=30, deadline=None)
@given(passed=st.lists(st.booleans(), min_size=1, max_size=12), data=st.data())
def test_a_pass_rate_does_not_depend_on_the_order_in_a_step(passed: list[bool], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(passed))
    rates = []
    for rewards in (passed, shuffled):
        source = _open()
        source.observe(1, {}, [0] * len(rewards), [float(r) for r in rewards])
        rates.append(source.metrics()["curriculum/easy_pass_rate"])
    assert rates[0] == rates[1] == pytest.approx(sum(passed) / len(passed))


def test_rollouts_that_cannot_be_are_refused() -> None:
    source = _open()
    with pytest.raises(DataError, match="one row and one reward per rollout, given 2 and 1"):
        source.observe(1, {}, [0, 1], [1.0])
    with pytest.raises(DataError, match=r"rows \[12\] were reported; this curriculum has rows 0 to 11"):
        source.observe(1, {}, [0, 12], [1.0, 1.0])
    with pytest.raises(ConfigError, match="at least one prompt, given 0"):
        source.next(0)
    assert source.metrics()["curriculum/stage_steps"] == 0
