"""Reward lint of a function: failures, time and repeatability, with values by hand."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from typing import Any

import pytest

from rlkit.controllers.reward import RewardController
from rlkit.errors import DataError, RewardError
from rlkit.reward_lint import lint_rewards
from rlkit.rewards import overlong_penalty
from tests.reward_lint.tables import RISING, found, lint, table
from tests.tiny import tiny_classifier, tiny_tokenizer


def test_a_function_is_called_on_the_recorded_responses() -> None:
    report = lint(lambda response_length, prompt, finish_reason: float(response_length * (finish_reason == "stop")))
    assert report.terms == ("reward",)
    assert found(report, "length").value == pytest.approx(1.0)
    assert found(report, "latency").severity == "info"


def test_a_function_that_fails_names_samples_and_reason() -> None:
    def picky(response: str) -> Any:
        return {"0": 1 / 2, "3": math.nan, "5": "high"}.get(response[0]) if response[0] != "7" else 1 / 0

    finding = found(lint(picky), "values")
    assert (finding.term, finding.severity, finding.value) == ("picky", "error", 3)
    assert "fails on samples 3, 5, 7. The first: reward 'picky' returned nan for sample 3" in finding.message
    finding = found(lint(lambda responses: [1.0]), "values")
    assert finding.value == 16
    assert "returned 1 rewards for 16 samples" in finding.message


def test_a_function_whose_parameters_cannot_be_filled_is_an_error_at_once() -> None:
    with pytest.raises(RewardError, match="asks for a column 'answer'"):
        lint(lambda response, answer: 0.0)


def test_dataset_columns_come_from_the_table_or_from_the_dataset() -> None:
    def right(response: str, answer: float) -> float:
        return answer + len(response) / 100

    answers = [0.5, 1.5, 2.5, 3.5]
    by_row = lint_rewards(table(), right, data=[{"answer": a} for a in answers])
    in_table = lint(right, answer=[answers[i // 4] for i in range(16)])
    assert by_row.terms == in_table.terms == ("right",)
    assert not [f for f in by_row.findings if f.severity != "info"]
    with pytest.raises(DataError, match=r"of dataset row 3, which data \(length 3\) lacks"):
        lint_rewards(table(), right, data=[{"answer": a} for a in answers[:3]])


def test_latency_of_a_slow_function_and_of_a_few_slow_calls() -> None:
    def slow_once(response: str) -> float:
        time.sleep(0.3 if response[0] == "6" else 0)
        return float(int(response[0], 16))

    finding = found(lint(slow_once), "latency")
    assert finding.severity == "warning"
    assert 0.3 <= finding.value < 2
    assert "on sample 6" in finding.message
    assert "median" in finding.message

    async def slow(response: str) -> float:
        await asyncio.sleep(1.05)
        return float(int(response[0], 16))

    finding = found(lint(slow), "latency")
    assert finding.severity == "warning"
    assert finding.value > 1.05
    assert "is slow" in finding.message


def test_a_limit_that_is_reached_is_told() -> None:
    async def endless(response: str) -> float:
        await asyncio.sleep(60 if response[0] == "2" else 0)
        return float(int(response[0], 16))

    controller = RewardController(endless, timeout=0.3)
    finding = found(lint(controller), "values")
    assert (finding.term, finding.severity, finding.value) == ("endless", "error", 1)
    assert "runs into its time limit on sample 2" in finding.message
    assert controller.take_failures() == {"timeouts": 0, "errors": 0}


def test_a_function_that_gives_other_values_when_called_again() -> None:
    calls = itertools.count()

    def noisy(response: str) -> float:
        return float(int(response[0], 16)) + (next(calls) >= 16 and response[0] in "4b")

    finding = found(lint(noisy), "determinism")
    assert (finding.term, finding.severity, finding.value) == ("noisy", "warning", 2)
    assert "for samples 4, 11 (first 4, then 5)" in finding.message
    assert lint(lambda response: None if response[0] == "0" else float(int(response[0], 16))).ok


def test_a_function_is_checked_against_recorded_terms_and_replaces_its_own_name() -> None:
    def value(response: str) -> float:
        return float(int(response[0], 16))

    report = lint_rewards(table(**{"reward/other": RISING, "reward/value": [1.0] * 16}), value)
    assert report.terms == ("other", "value")
    assert found(report, "terms").term == "other / value"
    assert lint_rewards(table(**{"reward/value": RISING}), value, name="new").terms == ("value", "new")


def test_only_the_last_rows_are_given_to_a_function() -> None:
    seen: list[str] = []

    def watching(responses: list[str]) -> list[float]:
        seen.extend(r[0] for r in responses)
        return [float(int(r[0], 16)) for r in responses]

    assert lint_rewards(table(), watching, max_rows=4).rollouts == 4
    assert seen == ["c", "d", "e", "f"] * 2


def test_a_controller_with_a_model_and_a_penalty() -> None:
    report = lint(RewardController(tiny_classifier(), tiny_tokenizer(), name="model"))
    assert report.terms == ("model",)
    assert not [f for f in report.findings if f.severity == "error"]
    report = lint(overlong_penalty(17, 8))
    assert found(report, "length").value == pytest.approx(-1.0)
