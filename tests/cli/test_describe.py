"""Parts of a run in a few words."""

import pytest

from rlkit.cli.describe import clean, flat_changes, request_details, request_text, setting_text, stage_shares
from rlkit.cli.view import Series


def test_text_of_a_model_cannot_steer_the_terminal() -> None:
    assert clean("a\x1b[31mred\nnext\ttab\x07\u202eend") == "a·[31mred⏎next tab··end"


def test_requests_in_words() -> None:
    assert request_text({"kind": "pause", "args": {}}) == "pause"
    assert request_text({"kind": "step", "args": {"n": 3}}) == "step 3"
    changes = {"lr": 1e-6, "reward_weights": {"brevity": 0.5, "tone": 1}}
    assert (
        request_text({"kind": "set", "args": changes})
        == "set lr=1e-06 reward_weights.brevity=0.5 reward_weights.tone=1"
    )
    refused = {"kind": "set", "args": {"lr": -1}, "status": "refused", "reason": "lr must be >= 0", "source": "cli"}
    assert request_details(refused).plain == "set lr=-1  cli  lr must be >= 0"


def test_settings_in_words() -> None:
    assert setting_text(True) == "True"
    assert setting_text(2e-5) == "2e-05"
    assert setting_text({"a": 1, "b": 0.25}) == "a 1, b 0.25"
    assert flat_changes({"a": {"b": {"c": 1}}}) == ["a.b.c=1"]


def test_shares_count_time_once() -> None:
    # A step of 10 s: rollout 0-6 holds actor 0-5.5, within which the rewards ran at 2-3 and 2.5-4; update is 6-10.
    spans = [
        {"name": "rollout", "start": 0.0, "duration_s": 6.0},
        {"name": "actor", "start": 0.0, "duration_s": 5.5},
        {"name": "tone", "start": 2.0, "duration_s": 1.0},
        {"name": "length", "start": 2.5, "duration_s": 1.5},
        {"name": "update", "start": 6.0, "duration_s": 4.0},
    ]
    series = Series()
    series.add(1, 10_000.0)
    expected = {"update": 0.4, "actor": 0.35, "length": 0.15, "tone": 0.1, "rollout": 0.05}
    shares = stage_shares(spans, {"train/step_time_ms": series})
    assert dict(shares) == pytest.approx(expected)
    assert [name for name, _ in shares] == list(expected)
    assert dict(stage_shares(spans, {})) == pytest.approx(expected)
    assert stage_shares([], {}) == []
