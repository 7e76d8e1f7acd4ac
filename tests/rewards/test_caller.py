"""Callers of reward functions: their options, batches, and what a failed call comes to."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from rlkit.errors import ConfigError, RewardError
from tests.rewards.calling import caller, score


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout must be seconds above 0, or None for no limit; given 0"),
        ({"timeout": math.inf}, "timeout must be seconds above 0"),
        ({"timeout": "1"}, "timeout must be seconds above 0"),
        ({"workers": -1}, "workers must be a whole number of at least 0, given -1"),
        ({"workers": True}, "workers must be a whole number"),
        ({"on_error": "zero"}, "on_error must be 'raise' or 'abstain', given 'zero'"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, given 0"),
        ({"max_concurrent": 0}, "max_concurrent must be a whole number of at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        caller(len, **options)


# Batches


def test_a_batched_function_is_called_for_at_most_batch_size_samples() -> None:
    sizes: list[int] = []

    def counted(responses: list[str], row: list[int]) -> list[int]:
        sizes.append(len(responses))
        return row

    assert score(caller(counted, batch_size=3)) == [float(i) for i in range(8)]
    assert sizes == [3, 3, 2]
    assert score(caller(counted)) == [float(i) for i in range(8)]
    assert sizes == [3, 3, 2, 8]


def test_a_failure_in_a_later_batch_names_its_samples() -> None:
    def fails(responses: list[str]) -> list[float]:
        if "r4" in responses:
            raise KeyError("r4")
        return [1.0, math.inf, 1.0][: len(responses)] if "r7" in responses else [1.0] * len(responses)

    with pytest.raises(RewardError, match="reward 'fails' raised KeyError on samples 3 to 5: 'r4'"):
        score(caller(fails, batch_size=3))
    scorer = caller(fails, batch_size=3, on_error="abstain")
    scores = score(scorer)
    assert [i for i, value in enumerate(scores) if math.isnan(value)] == [3, 4, 5, 7]
    assert scorer.take_failures() == {"timeouts": 0, "errors": 4}


# What a failed call comes to


def test_abstaining_keeps_the_other_samples_counts_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    def picky(response: str) -> Any:
        if response == "r2":
            raise ValueError("no number in it")
        return {"r5": "high", "r6": math.nan, "r7": None}.get(response, 1.0)

    scorer = caller(picky, on_error="abstain")
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        scores = score(scorer)
    assert [i for i, value in enumerate(scores) if math.isnan(value)] == [2, 5, 6, 7]
    assert scores[:2] + scores[3:5] == [1.0] * 4
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "reward term 'picky' abstains from sample 2 (prompt 'prompt 2'): reward 'picky' raised ValueError on sample 2: "
        "no number in it",
        "reward term 'picky' abstains from sample 5 (prompt 'prompt 5'): reward 'picky' returned str 'high' for sample "
        "5; expected a finite number, or None to abstain",
        "reward term 'picky' abstains from sample 6 (prompt 'prompt 6'): reward 'picky' returned nan for sample 6; "
        "expected a finite number, or None to abstain",
    ]
    assert scorer.take_failures() == {"timeouts": 0, "errors": 3}
    assert scorer.take_failures() == {"timeouts": 0, "errors": 0}


def test_the_log_names_every_failed_sample_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    scorer = caller(lambda response: 1 / 0, on_error="abstain")
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        scorer.score(["p"] * 11, ["r"] * 11, [{}] * 11)
    assert len(caplog.records) == 9
    assert caplog.records[-1].getMessage() == "reward term 'reward' abstains from these samples too: 8, 9, 10"


def test_a_missing_column_is_an_error_under_every_policy() -> None:
    with pytest.raises(RewardError, match="asks for a column 'answer'"):
        score(caller(lambda response, answer: 1.0, on_error="abstain"))
