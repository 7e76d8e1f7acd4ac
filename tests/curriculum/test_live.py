"""Live changes to a curriculum: what can be set, for how long, and all of it or nothing."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.curriculum import Curriculum, CurriculumSource, Ramp, Reaches, Stage, Steps
from rlkit.errors import ConfigError
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
POOLS = {"easy": ["good w1", "good w2"], "hard": [f"bad w{i}" for i in range(7)], "odd": ["a day", "w1"]}
STAGES = [
    Stage("warm-up", {"easy": 1.0}, until=Steps(3)),
    Stage("mixed", {"easy": 0.3, "hard": Ramp(0.1, 0.7, 4)}, until=Reaches("m", 0.6, 2, 0.4, smoothing=0.3)),
    Stage("all", "by_pass_rate"),
]


def _curriculum() -> Curriculum:
    return Curriculum(POOLS, STAGES)


def _source() -> CurriculumSource:
    return _curriculum().open(TOKENIZER, 0, 16)


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
    source.observe(1, {"m": 0.7}, [0, 6], [1.0, 0.0])
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
