"""Live changes to a curriculum are all or nothing, and its state resumes exactly (R17)."""

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.curriculum import Curriculum, CurriculumSource, Ramp, Reaches, Stage, Steps
from rlkit.errors import CheckpointError, ConfigError, DataError
from rlkit.runs.state_files import pack, unpack
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
POOLS = {"easy": [f"good w{i}" for i in range(5)], "hard": [f"bad w{i}" for i in range(7)], "odd": ["a day", "w1"]}
STAGES = [
    Stage("warm-up", {"easy": 1.0}, until=Steps(3)),
    Stage("mixed", {"easy": 0.3, "hard": Ramp(0.1, 0.7, 4)}, until=Reaches("m", 0.6, 2, 0.4, smoothing=0.3)),
    Stage("all", "by_pass_rate"),
]


def _curriculum(pools: Any = POOLS, stages: Any = STAGES, **options: Any) -> Curriculum:
    return Curriculum(pools, stages, **{"pass_at": 0.5, "pass_decay": 0.9, **options})


def _source(seed: int = 0, **changes: Any) -> CurriculumSource:
    return _curriculum(**changes).open(TOKENIZER, seed, 16)


def _saved(source: CurriculumSource) -> dict[str, Any]:
    """The state as a checkpoint's files keep it."""
    packed = pack(source.state_dict(), private=True)
    assert packed.files == {}
    state: dict[str, Any] = unpack(json.loads(json.dumps(packed.tree, allow_nan=False)), lambda _file, _name: None)
    return state


def _train(source: CurriculumSource, first: int, last: int, by_hand: dict[int, dict[str, Any]]) -> list[Any]:
    """Steps first to last - 1 with made-up rewards; everything that can be seen of each."""
    seen: list[Any] = []
    for step in range(first, last):
        if step in by_hand:
            source.set(by_hand[step])
        rows = source.next(1 + step % 4)
        rewards = [0.5 + 0.5 * math.sin(7.0 * step + row.index) for row in rows]
        source.observe(step, {"m": 0.5 + 0.3 * math.sin(step / 3)}, [row.index for row in rows], rewards)
        seen.append(([(row.index, row.text) for row in rows], source.metrics(), source.settings()))
    return [*seen, source.history()]


BY_HAND = [
    {"stage": "all"},
    {"stage": "warm-up", "pool_weights": {"odd": 2}},
    {"pool_weights": {"hard": 0.5}},
    {"pool_weights": None},
    {"until": {"mixed": {"value": 0.55, "for_steps": 1}}},
    {"hold": True},
    {"hold": False},
]


@settings(max_examples=40, deadline=None)
@given(
    at=st.integers(0, 40),
    seed=st.integers(0, 99),
    by_hand=st.dictionaries(st.integers(1, 39), st.sampled_from(BY_HAND), max_size=5),
)
def test_r17_saved_anywhere_it_goes_on_as_if_nothing_had_happened(
    at: int, seed: int, by_hand: dict[int, dict[str, Any]]
) -> None:
    whole = _train(_source(seed), 0, 40, by_hand)
    source = _source(seed)
    before = _train(source, 0, at, by_hand)
    resumed = _source(seed + 1)
    resumed.next(3)
    resumed.load_state_dict(_saved(source))
    assert before[:-1] + _train(resumed, at, 40, by_hand) == whole


def test_the_script_of_the_test_above_goes_on_and_falls_back() -> None:
    source = _source()
    _train(source, 0, 40, {})
    assert [entry["to"] for entry in source.history()] == ["warm-up", "mixed", "all", "mixed", "all", "mixed"]


@settings(max_examples=30, deadline=None)
@given(pieces=st.lists(st.integers(1, 9), min_size=1, max_size=8), cut=st.integers(0, 7))
def test_r17_draws_do_not_depend_on_how_they_are_split(pieces: list[int], cut: int) -> None:
    first, second, third = (_source(3) for _ in range(3))
    for source in (first, second, third):
        source.set({"stage": "all"})
    at_once = [row.index for row in first.next(sum(pieces))]
    split: list[int] = []
    for number, n in enumerate(pieces):
        if number == cut:
            third.load_state_dict(_saved(second))
            second = third
        split += [row.index for row in second.next(n)]
    assert split == at_once


def test_a_failed_step_can_be_taken_again() -> None:
    source = _source()
    source.set({"stage": "all"})
    before = source.state_dict()
    drawn = source.next(9)
    source.observe(1, {"m": 0.0}, [0], [1.0])
    source.load_state_dict(before)
    assert source.state_dict() == before
    assert source.next(9) == drawn


def test_a_state_is_not_moved_by_what_comes_after() -> None:
    source = _source()
    state = source.state_dict()
    kept = copy.deepcopy(state)
    _train(source, 0, 12, {5: {"pool_weights": {"odd": 1}}})
    source.history().clear()
    source.settings()["pool_weights"]["easy"] = 9.0
    assert state == kept
    assert len(source.history()) > 2


# States that belong elsewhere


def _changed(state: dict[str, Any], *path: str, value: Any = None, drop: bool = False) -> dict[str, Any]:
    state = copy.deepcopy(state)
    place = state
    for key in path[:-1]:
        place = place[key]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return state


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"pools": {**POOLS, "more": ["w1"]}},
            CheckpointError,
            r"its pools are \['easy', 'hard', 'odd'\], here .*'more'",
        ),
        ({"pools": dict(reversed(POOLS.items()))}, CheckpointError, r"here \['odd', 'hard', 'easy'\]"),
        ({"pools": {**POOLS, "hard": ["w1"]}}, DataError, "other prompts in pool 'hard'"),
        (
            {"stages": STAGES[1:]},
            CheckpointError,
            r"its stages are \['warm-up', 'mixed', 'all'\], here \['mixed', 'all'\]",
        ),
        (
            {"stages": [Stage("warm-up", {"easy": 1.0}, until=Steps(4)), *STAGES[1:]]},
            CheckpointError,
            "until of stage 'warm-up' is {'steps': 3}, here {'steps': 4}",
        ),
        (
            {"stages": [Stage("warm-up", {"odd": 1.0}, until=Steps(3)), *STAGES[1:]]},
            CheckpointError,
            "mixture of stage 'warm-up' is {'easy': 1.0}, here {'odd': 1.0}",
        ),
        ({"pass_at": 0.7}, CheckpointError, "its options are .*'pass_at': 0.5.*, here .*'pass_at': 0.7"),
    ],
)
def test_the_state_of_another_curriculum_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    state = _source().state_dict()
    other = _source(**changes)
    before = other.state_dict()
    with pytest.raises(error, match=message):
        other.load_state_dict(state)
    assert other.state_dict() == before


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("more",), 1, r"keys of state_dict\(\); it differs in \['more'\]"),
        (("rng",), None, "keys of state_dict"),
        (("rng",), {"bit_generator": "MT19937"}, "the saved random state of the curriculum cannot be used"),
        (("pools", "hard", "epoch"), None, r"saved state of pool 'hard' differs in its keys: \['epoch'\]"),
        (("progress", "stage"), None, r"saved progress of a curriculum .* it differs in \['stage'\]"),
        (("progress", "stage"), 3, "the saved stage has index 3, and there are 3 stages"),
        (("progress", "reached", "streak"), None, "saved reached of a curriculum"),
        (("pass_rates", "sums", "odd"), None, r"sums and weights of the pools \['easy', 'hard', 'odd'\]"),
        (("edits", "hold"), None, r"hold rules, pool_weights and hold, given \['pool_weights', 'rules'\]"),
        (("edits", "rules", "mixed"), None, "the saved edits do not fit this curriculum: 'mixed'"),
        (("edits", "rules", "more"), {}, "the saved edits do not fit this curriculum: unknown saved stage key 'more'"),
        (("edits", "pool_weights", "more"), 1.0, "unknown saved pool key 'more'"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(path: tuple[str, ...], value: Any, message: str) -> None:
    source = _source()
    _train(source, 0, 6, {})
    before = source.state_dict()
    damaged = _changed(_source(1).state_dict(), *path, value=value, drop=value is None)
    with pytest.raises(CheckpointError, match=message):
        source.load_state_dict(damaged)
    assert source.state_dict() == before


# Live changes


def test_settings_are_what_can_be_set() -> None:
    source = _source()
    expected = {
        "stage": "warm-up",
        "pool_weights": {"easy": 1.0, "hard": 0.0, "odd": 0.0},
        "hold": False,
        "until": {
            "warm-up": {"steps": 3},
            "mixed": {"metric": "m", "value": 0.6, "for_steps": 2, "falls_back_below": 0.4, "smoothing": 0.3},
        },
    }
    assert source.settings() == expected == json.loads(json.dumps(expected))
    source.set(source.settings())
    assert source.settings() == expected
    assert len(source.history()) == 1


def test_weights_set_by_hand_last_until_the_stage_ends() -> None:
    source = _source()
    source.set({"pool_weights": {"odd": 3}})
    assert source.settings()["pool_weights"] == {"easy": 1.0, "hard": 0.0, "odd": 3.0}
    source.set({"pool_weights": {"hard": 4}})
    assert source.metrics()["curriculum/hard_share"] == 0.5
    source.set({"pool_weights": None})
    assert source.settings()["pool_weights"] == {"easy": 1.0, "hard": 0.0, "odd": 0.0}
    source.set({"pool_weights": {"easy": 0, "odd": 1}})
    assert {row.columns["pool"] for row in source.next(9)} == {"odd"}
    for step in (1, 2, 3):
        source.observe(step, {"m": 0.0}, [], [])
    # The first weights of the ramp in "mixed".
    assert source.settings()["pool_weights"] == {"easy": 0.3, "hard": 0.1, "odd": 0.0}
    source.set({"pool_weights": {"odd": 1}})
    source.set({"stage": "warm-up"})
    assert source.settings()["pool_weights"] == {"easy": 1.0, "hard": 0.0, "odd": 0.0}
    source.set({"stage": "all", "pool_weights": {"odd": 0.5}})
    assert source.settings()["pool_weights"] == pytest.approx({"easy": 0.3, "hard": 0.3, "odd": 0.5})


GOOD: list[dict[str, Any]] = [
    {"stage": "mixed"},
    {"pool_weights": {"odd": 2}},
    {"pool_weights": None},
    {"until": {"warm-up": {"steps": 9}}},
    {"hold": True},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"stge": "mixed"}, "unknown curriculum key 'stge'; did you mean 'stage'"),
    ({"stage": "mixd"}, "unknown stage key 'mixd'; did you mean 'mixed'"),
    ({"stage": 1}, "unknown stage key 1; known are all, mixed, warm-up"),
    ({"pool_weights": {"od": 1}}, "unknown pool key 'od'; did you mean 'odd'"),
    ({"pool_weights": {"odd": -1}}, "weight of pool 'odd' must be 0 or more, given -1"),
    ({"pool_weights": {"odd": "1"}}, "weight of pool 'odd' must be a finite number, given '1'"),
    ({"pool_weights": {"easy": 0, "hard": 0, "odd": 0}}, "no pool with a positive weight"),
    ({"pool_weights": [1, 2]}, r"pool_weights must be {pool: weight}, or None"),
    ({"until": {"warm_up": {"steps": 1}}}, "unknown stage key 'warm_up'; did you mean 'warm-up'"),
    ({"until": {"warm-up": {"step": 1}}}, "unknown stage 'warm-up' until key 'step'; did you mean 'steps'"),
    ({"until": {"warm-up": {"steps": 0}}}, "steps of a stage must be a whole number of at least 1"),
    ({"until": {"warm-up": 5}}, "is changed by a dictionary of its values, given 5"),
    ({"until": {"mixed": {"value": 0.3}}}, "falls_back_below=0.4 is above value=0.3"),
    ({"until": {"mixed": {"metric": "n"}}}, "stage 'mixed' watches 'm'; the metric itself is fixed"),
    ({"until": {"all": {"steps": 1}}}, "stage 'all' is the last one and has no rule to change"),
    ({"until": 5}, "until must be {stage: {field: value}}, given 5"),
    ({"hold": 1}, "hold must be true or false, given 1"),
]


@pytest.mark.parametrize(("bad", "message"), [*BAD, ({}, "a dictionary with some of stage, pool_weights, until, hold")])
def test_a_change_that_cannot_be_is_refused(bad: dict[str, Any], message: str) -> None:
    source = _source()
    before = source.state_dict()
    with pytest.raises(ConfigError, match=message):
        source.set(bad)
    assert source.state_dict() == before


@settings(max_examples=60, deadline=None)
@given(good=st.lists(st.sampled_from(GOOD), max_size=4), bad=st.sampled_from(BAD), first=st.booleans())
def test_changes_are_all_or_nothing(good: list[dict[str, Any]], bad: tuple[dict[str, Any], str], first: bool) -> None:
    source = _source()
    _train(source, 0, 2, {})
    before = source.state_dict()
    others = {key: value for change in good for key, value in change.items() if key not in bad[0]}
    with pytest.raises(ConfigError):
        source.set({**bad[0], **others} if first else {**others, **bad[0]})
    assert source.state_dict() == before
    if others:
        source.set(others)
        assert source.state_dict() != before or others == {"pool_weights": None}


def test_the_declaration_is_not_changed_by_a_change() -> None:
    curriculum = _curriculum()
    before = curriculum.describe()
    source = curriculum.open(TOKENIZER, 0, 16)
    source.set({"stage": "mixed", "until": {"mixed": {"value": 0.9}}, "pool_weights": {"odd": 1}, "hold": True})
    assert curriculum.describe() == before
    assert source.describe()["stages"] == before["stages"]
    assert curriculum.open(TOKENIZER, 0, 16).settings()["until"]["mixed"]["value"] == 0.6
