"""How a curriculum moves between stages: by steps, by thresholds with hysteresis, by hand, and not at all."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from rlkit.curriculum import Curriculum, CurriculumSource, Reaches, Stage, Steps
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
POOLS = {"easy": ["good w1", "good w2"], "hard": ["bad w1", "bad w2"]}


def _source(*rules: Any, **options: Any) -> CurriculumSource:
    """Stages s0, s1, ... that end by the rules, and a last one."""
    stages = [Stage(f"s{i}", {"easy": 1}, until=rule) for i, rule in enumerate(rules)]
    stages.append(Stage(f"s{len(rules)}", {"hard": 1}))
    return Curriculum(POOLS, stages, **options).open(TOKENIZER, 0, 16)


def _stages(source: CurriculumSource, series: Iterable[float | None], start: int = 1) -> list[int]:
    """Index of the stage in force after each value of the metric "m"; None leaves the metric out."""
    path = []
    for step, value in enumerate(series, start):
        source.observe(step, {} if value is None else {"m": value}, [], [])
        path.append(int(source.metrics()["curriculum/stage"]))
    return path


def test_by_steps() -> None:
    source = _source(Steps(2), Steps(3))
    assert _stages(source, [0.0] * 7) == [0, 1, 1, 1, 2, 2, 2]
    assert source.history() == [
        {"step": 0, "from": None, "to": "s0", "reason": "start"},
        {"step": 2, "from": "s0", "to": "s1", "reason": "after 2 steps"},
        {"step": 5, "from": "s1", "to": "s2", "reason": "after 3 steps"},
    ]
    assert source.metrics()["curriculum/stage_steps"] == 2.0
    assert source.stage.name == "s2"


def test_a_threshold_must_hold_for_steps_in_a_row() -> None:
    source = _source(Reaches("m", 0.8, for_steps=3))
    assert _stages(source, [0.9, 0.8, 0.79, 0.8, 0.8, 0.8, 0.0, 0.0]) == [0, 0, 0, 0, 0, 1, 1, 1]
    assert source.history()[-1]["reason"] == "m at or above 0.8 for 3 steps"


def test_steps_above_the_threshold_of_one_stage_do_not_count_in_the_next() -> None:
    rule = Reaches("m", 0.8, for_steps=2)
    assert _stages(_source(rule, rule), [0.9] * 5) == [0, 1, 1, 2, 2]


def test_it_falls_back_after_as_many_steps_below_the_lower_threshold() -> None:
    source = _source(Reaches("m", 0.8, for_steps=2, falls_back_below=0.5))
    #          up ------  between -  one below   two below: back   between  up again
    series = [0.8, 0.8, 0.6, 0.79, 0.4, 0.5, 0.4, 0.4, 0.7, 0.7, 0.8, 0.8]
    assert _stages(source, series) == [0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1]
    assert [(e["step"], e["to"], e["reason"]) for e in source.history()[2:]] == [
        (8, "s0", "m below 0.5 for 2 steps"),
        (12, "s1", "m at or above 0.8 for 2 steps"),
    ]


def test_it_falls_back_one_stage_at_a_time() -> None:
    rule = Reaches("m", 0.8, for_steps=1, falls_back_below=0.5)
    source = _source(rule, rule)
    assert _stages(source, [0.9, 0.9, 0.6, 0.1, 0.1, 0.1]) == [1, 2, 2, 1, 0, 0]


def test_a_stage_that_ended_by_steps_does_not_come_back() -> None:
    source = _source(Steps(1), Reaches("m", 0.8))
    assert _stages(source, [0.0, 0.0, 0.0, 0.9, 0.0, 0.0]) == [1, 1, 1, 2, 2, 2]


def test_noise_between_the_thresholds_does_not_make_it_flap() -> None:
    noise = np.random.default_rng(0).normal(0.7, 0.08, 600).tolist()
    # One threshold for both ways and no patience: it goes back and forth all the time.
    naive = _source(Reaches("m", 0.7, for_steps=1, falls_back_below=0.7))
    _stages(naive, noise)
    assert len(naive.history()) > 200
    # Two thresholds, three steps: it goes on once, and stays.
    steady = _source(Reaches("m", 0.75, for_steps=3, falls_back_below=0.5))
    path = _stages(steady, noise)
    assert [entry["to"] for entry in steady.history()] == ["s0", "s1"]
    assert path[-1] == 1
    # A real collapse still brings it back, soon after it happened.
    collapse = np.random.default_rng(1).normal(0.3, 0.08, 20).tolist()
    assert 0 in _stages(steady, collapse, start=601)[:6]


def test_smoothing_is_a_running_average_that_starts_anew_in_each_stage() -> None:
    source = _source(Reaches("m", 0.7, smoothing=0.5), Reaches("m", 0.7, smoothing=0.5))
    # s0: 0, 0.5, 0.75 goes on. s1: 0.66 (with the 0.75 of s0 it would be 0.705), 0.63, 0.715.
    assert _stages(source, [0.0, 1.0, 1.0, 0.66, 0.6, 0.8]) == [0, 0, 1, 1, 1, 2]
    plain = _source(Reaches("m", 0.7), Reaches("m", 0.7))
    assert _stages(plain, [0.0, 1.0, 1.0]) == [0, 1, 2]


def test_a_step_without_the_metric_counts_neither_way() -> None:
    source = _source(Reaches("m", 0.8, for_steps=3, falls_back_below=0.5))
    assert _stages(source, [0.9, None, 0.9, math.nan, 0.9]) == [0, 0, 0, 0, 1]
    assert _stages(source, [0.1, None, 0.1, math.nan, 0.1], start=6) == [1, 1, 1, 1, 0]
    assert source.history()[1]["step"] == 5


def test_the_curriculum_s_own_metrics_can_end_a_stage() -> None:
    source = _source(Reaches("curriculum/easy_pass_rate", 0.75), pass_decay=0.5)
    # The average after each step: 0, then (0.5 * 0 + 0.5 * 1) / 0.75 = 2/3, then (0.25 + 0.5) / 0.875 = 6/7.
    for step, reward in enumerate([0.0, 1.0, 1.0], 1):
        assert source.stage.name == "s0"
        source.observe(step, {}, [0], [reward])
    assert source.metrics()["curriculum/easy_pass_rate"] == pytest.approx(6 / 7)
    assert source.stage.name == "s1"


def test_a_rule_without_a_metric_watches_the_measure_of_the_curriculum() -> None:
    source = _source(Reaches(None, 0.8), measure="m")
    assert _stages(source, [0.7, 0.8]) == [0, 1]


def test_the_rewards_of_a_stage_come_with_it() -> None:
    strict, lenient = object(), object()
    stages = [
        Stage("a", {"easy": 1}, until=Steps(1), rewards=lenient),
        Stage("b", {"easy": 1}, until=Steps(1)),
        Stage("c", {"easy": 1}, rewards=strict),
    ]
    source = Curriculum(POOLS, stages).open(TOKENIZER, 0, 16)
    seen = [source.stage_rewards]
    for step in (1, 2):
        source.observe(step, {}, [], [])
        seen.append(source.stage_rewards)
    assert seen == [lenient, None, strict]


def test_the_pool_follows_the_stage() -> None:
    source = _source(Steps(2))
    pools = []
    for step in range(1, 5):
        pools.append({row.columns["pool"] for row in source.next(8)})
        source.observe(step, {}, [], [])
    assert pools == [{"easy"}, {"easy"}, {"hard"}, {"hard"}]


def test_a_metric_that_nobody_reports_is_warned_of_once() -> None:
    source = _source(Reaches("reward/meen", 0.8), Reaches("curriculum/hard_pass_rate", 0.5), Reaches("reward/std", 1))
    message = "stage 's0' ends by the metric 'reward/meen', which step 1 did not report; did you mean 'reward/mean'?"
    with pytest.warns(RuntimeWarning) as caught:
        source.observe(1, {"reward/mean": 0.9, "reward/std": 0.1}, [], [])
    assert [str(warning.message) for warning in caught] == [message]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source.observe(2, {"reward/mean": 0.9}, [], [])
    assert source.stage.name == "s0"


# On hold and by hand


def test_on_hold_nothing_moves_and_counting_goes_on() -> None:
    source = _source(Steps(2), Reaches("m", 0.8, for_steps=2))
    source.set({"hold": True})
    assert _stages(source, [0.9] * 4) == [0] * 4
    assert source.metrics()["curriculum/stage_steps"] == 4.0
    source.set({"hold": False})
    assert _stages(source, [0.9, 0.9, 0.9], start=5) == [1, 1, 2]


def test_a_jump_is_not_undone_by_the_stage_before() -> None:
    rule = Reaches("m", 0.8, for_steps=1, falls_back_below=0.5)
    source = _source(rule, rule)
    assert _stages(source, [0.1]) == [0]
    source.set({"stage": "s1"})
    assert source.metrics()["curriculum/stage_steps"] == 0.0
    assert _stages(source, [0.1, 0.1, 0.9], start=2) == [1, 1, 2]
    # From s2, which was reached and not jumped to, it falls back to s1, and on to s0.
    assert _stages(source, [0.1, 0.1], start=5) == [1, 0]
    assert source.history()[1] == {"step": 1, "from": "s0", "to": "s1", "reason": "set by hand"}


def test_a_changed_threshold_is_in_force_from_the_next_step() -> None:
    source = _source(Reaches("m", 0.8, for_steps=2), Steps(100))
    assert _stages(source, [0.7, 0.7]) == [0, 0]
    source.set({"until": {"s0": {"value": 0.6}, "s1": {"steps": 1}}})
    # Steps above the old threshold do not count for the new one.
    assert _stages(source, [0.7, 0.7, 0.0], start=3) == [0, 1, 2]
    raised = _source(Reaches("m", 0.8, for_steps=2))
    assert _stages(raised, [0.85]) == [0]
    raised.set({"until": {"s0": {"value": 0.84}}})
    assert _stages(raised, [0.85, 0.85], start=2) == [0, 1]
