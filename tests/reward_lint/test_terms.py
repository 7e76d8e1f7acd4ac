"""Reward lint of recorded terms: for every check a table that trips it and one that does not, values by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import rlkit
from rlkit.errors import DataError, RunError
from rlkit.reward_lint import lint_rewards
from rlkit.runs.layout import read_status, write_status
from rlkit.runs.rollouts import write_rollouts
from tests.reward_lint.tables import LENGTHS, RISING, found, lint, make_run, table


def test_a_sound_reward_has_no_findings() -> None:
    report = lint(**{"reward": RISING, "reward/a": RISING})
    assert report.findings == ()
    assert report.ok
    assert (report.terms, report.rollouts) == (("a",), 16)
    assert repr(report) == "reward lint of 1 term, 16 rollouts: no errors, no warnings"
    assert list(report.table().columns) == ["check", "term", "severity", "value", "message"]
    assert rlkit.lint_rewards is lint_rewards


# Recorded terms


@pytest.mark.parametrize("bad", [math.inf, -math.inf, "high", [1.0], {"score": 1}])
def test_values_that_are_no_numbers(bad: Any) -> None:
    finding = found(lint(**{"reward/a": [*RISING[:14], bad, bad]}), "values")
    assert (finding.term, finding.severity, finding.value) == ("a", "error", 2)
    assert "no finite number in samples 14, 15" in finding.message


def test_abstentions() -> None:
    """4 of 16 are a quarter, above a fifth; 3 are not."""
    none: list[float | None] = [None]
    finding = found(lint(**{"reward/a": none * 4 + RISING[4:]}), "abstention")
    assert (finding.severity, finding.value) == ("warning", 0.25)
    assert lint(**{"reward/a": none * 3 + RISING[3:]}).ok
    finding = found(lint(**{"reward/a": none * 16}), "abstention")
    assert (finding.severity, finding.value) == ("error", 1.0)


def test_a_constant_term() -> None:
    finding = found(lint(**{"reward/a": [0.5] * 15 + [None]}), "constant")
    assert (finding.term, finding.severity, finding.value) == ("a", "warning", 0.5)
    assert "is 0.5 for all 15 samples" in finding.message
    assert lint(**{"reward/a": [0.5] * 8 + [1.0] * 8, "group": [0] * 16}).ok


def test_a_term_that_drowns_the_others_by_spread() -> None:
    """Twelve times the spread of the other; ten times is not yet too much, and neither is twelve at a weight of 0.5."""
    other = [RISING[(7 * i + 3) % 16] for i in range(16)]
    loud = [12 * x for x in RISING]
    finding = found(lint(**{"reward/a": loud, "reward/b": other}), "scale")
    assert (finding.term, finding.severity) == ("a", "warning")
    assert finding.value == pytest.approx(12.0)
    assert lint(**{"reward/a": [9.9 * x for x in RISING], "reward/b": other}).ok
    assert lint_rewards(table(**{"reward/a": loud, "reward/b": other}), weights={"a": 0.5}).ok


def test_a_term_that_drowns_the_others_by_its_mean() -> None:
    """b has mean 7.5 and standard deviation 4.761, in sum 12.261; 157.5 is 12.85 times that, 107.5 only 8.8 times."""
    other = [RISING[(7 * i + 3) % 16] for i in range(16)]
    finding = found(lint(**{"reward/a": [x + 150 for x in RISING], "reward/b": other}), "scale")
    assert finding.term == "a"
    assert finding.value == pytest.approx(12.846, abs=1e-3)
    assert "has a mean 13 times as large" in finding.message
    assert lint(**{"reward/a": [x + 100 for x in RISING], "reward/b": other}).ok


def test_correlation_with_length() -> None:
    finding = found(lint(**{"reward/a": [-x * x for x in LENGTHS]}), "length")
    assert (finding.term, finding.severity) == ("a", "warning")
    assert finding.value == pytest.approx(-1.0)
    assert "by writing shorter" in finding.message
    assert lint(**{"reward/a": RISING}).ok


def test_rank_correlation_equals_the_formula() -> None:
    """1 - 6 sum d^2 / (n (n^2 - 1)): swapping neighbours in 16 ranks makes sum d^2 = 16 and rho = 1 - 96/4080."""
    swapped = [float(i ^ 1) for i in range(16)]
    finding = found(lint(**{"reward/a": RISING, "reward/b": [x**3 for x in swapped]}), "terms")
    assert finding.value == pytest.approx(1 - 96 / 4080)


def test_lengths_are_characters_where_tokens_were_not_recorded() -> None:
    columns = table(**{"reward/a": LENGTHS})
    del columns["response_length"]
    assert found(lint_rewards(columns), "length").value == pytest.approx(1.0)
    del columns["response"]
    assert lint_rewards(columns).ok


def test_terms_that_say_the_same_or_the_opposite() -> None:
    assert lint(**{"reward/a": RISING, "reward/b": [RISING[(7 * i + 3) % 16] for i in range(16)]}).ok
    same = found(lint(**{"reward/a": RISING, "reward/b": [x + 1 for x in RISING]}), "terms")
    assert (same.term, same.severity) == ("a / b", "warning")
    assert same.value == pytest.approx(1.0)
    assert "one term counted twice" in same.message
    opposed = found(lint(**{"reward/a": RISING, "reward/b": [-x for x in RISING]}), "terms")
    assert opposed.value == pytest.approx(-1.0)
    assert "opposite directions" in opposed.message


def test_groups_without_spread() -> None:
    """Three of four groups are flat; two of four are at the bound and pass. A group of one abstained sample is none."""
    flat = [float(i // 4) for i in range(12)] + [0.0, 1.0, 2.0, 3.0]
    finding = found(lint(**{"reward": flat, "reward/a": flat}), "groups")
    assert (finding.term, finding.severity, finding.value) == ("reward", "warning", 0.75)
    assert "75% of the 4 groups" in finding.message
    assert lint(**{"reward": flat[4:] + flat[12:], "reward/a": RISING}).ok
    assert found(lint(lambda response: float(int(response[0], 16) // 4), reward=RISING), "groups").value == 1.0
    nothing: list[float | None] = [None] * 3
    assert found(lint(**{"reward/a": nothing + flat[3:]}), "groups").value == pytest.approx(2 / 3)


def test_a_term_without_spread_among_others_is_worth_a_word_only() -> None:
    flat = [float(i // 4) for i in range(16)]
    report = lint(
        **{"reward": [x + y for x, y in zip(flat, RISING, strict=True)], "reward/a": flat, "reward/b": RISING}
    )
    assert (found(report, "groups").term, found(report, "groups").severity) == ("a", "info")


def test_the_same_group_number_in_two_steps_is_two_groups() -> None:
    steps = [1] * 8 + [2] * 8
    values = [0.0] * 4 + [1.0] * 4 + [2.0] * 4 + [3.0] * 4
    group = [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert found(lint(reward=values, step=steps, group=group), "groups").value == 1.0
    assert not [f for f in lint(reward=values, step=[1] * 16, group=group).findings if f.check == "groups"]


def test_few_rollouts_are_not_judged_by_correlation() -> None:
    report = lint_rewards([{"reward/a": float(i), "response_length": i} for i in range(15)])
    assert [f.check for f in report.findings] == ["samples"]
    assert report.ok


# What can be linted


def test_the_weights_of_a_run_count(tmp_path: Path) -> None:
    other = [RISING[(7 * i + 3) % 16] for i in range(16)]
    folder = make_run(tmp_path / "run")
    write_rollouts(folder, 1, table(**{"reward/a": [12 * x for x in RISING], "reward/b": other}))
    assert not lint_rewards(folder.root).ok
    write_status(folder, {**read_status(folder), "settings": {"reward_weights": {"a": 0.5, "b": 1.0}}})
    assert lint_rewards(folder.root).ok
    assert lint_rewards(rlkit.attach(folder.root)).ok


def test_every_form_of_rollouts_gives_the_same(tmp_path: Path) -> None:
    columns = table(**{"reward": LENGTHS, "reward/a": LENGTHS})
    folder = make_run(tmp_path / "run")
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    forms: list[Any] = [columns, pd.DataFrame(columns), pd.DataFrame(columns, index=range(100, 116)), rows]
    write_rollouts(folder, 1, columns)
    forms += [folder.root, str(folder.root), rlkit.attach(folder.root)]
    reports = [lint_rewards(form) for form in forms]
    assert len(reports) == 7
    assert {report.findings for report in reports} == {reports[0].findings}
    assert found(reports[0], "length").value == pytest.approx(1.0)


def test_what_cannot_be_linted_is_refused(tmp_path: Path) -> None:
    for given, message in (
        ([], "there are no rollouts"),
        (7, "given int"),
        ({"reward": [1.0], "response": []}, "lists of one length"),
        ({"prompt": ["p"]}, r"hold no rewards.*got \['prompt'\]"),
    ):
        with pytest.raises(DataError, match=message):
            lint_rewards(given)
    with pytest.raises(DataError, match="needs the column 'response'"):
        lint_rewards({"prompt": ["p"]}, len)
    with pytest.raises(RunError):
        lint_rewards(tmp_path)


def test_numpy_numbers_and_booleans_are_numbers() -> None:
    values = [np.float32(i) if i % 2 else np.int64(i) for i in range(15)] + [True]
    assert not [f for f in lint(**{"reward/a": values}).findings if f.check == "values"]
