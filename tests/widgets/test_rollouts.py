import math
from typing import Any

from rlkit.runs import events
from rlkit.runs.rollouts import write_rollouts
from rlkit_widgets.rollouts import FULL_TEXT_SHOWN, RESPONSE_SHOWN, ROWS_SHOWN, rollout_message, rollouts_message
from rlkit_widgets.state import RunState
from tests.widgets.fake_run import FakeRun


def looked(run: FakeRun) -> RunState:
    state = RunState(run.folder)
    state.look()
    return state


def test_without_rollouts_the_table_is_empty(run: FakeRun) -> None:
    message = rollouts_message(looked(run), None)
    assert (message["step"], message["rows"]) == (None, [])


def test_the_newest_step_with_its_neighbours(run: FakeRun) -> None:
    for _ in range(3):
        run.take_step(rows=4)
    state = looked(run)
    newest = rollouts_message(state, None)
    assert [newest[key] for key in ("step", "previous", "next", "latest", "total")] == [3, 2, None, 3, 4]
    middle = rollouts_message(state, 2)
    assert [middle[key] for key in ("step", "previous", "next")] == [2, 1, 3]
    assert rollouts_message(state, 99)["step"] == 3
    assert rollouts_message(state, 0)["step"] == 1


def test_a_row_holds_terms_mixed_reward_length_and_finish(run: FakeRun) -> None:
    run.step = 7
    columns: dict[str, list[Any]] = {
        "prompt": ["The film was"],
        "response": [" good."],
        "reward": [0.75],
        "reward/sentiment": [0.5],
        "reward/brevity": [math.nan],
        "response_length": [3],
        "finish_reason": ["stop"],
    }
    path = write_rollouts(run.folder, 7, columns)
    run.events.write(events.rollouts(7, run.folder.relative(path), 1))
    message = rollouts_message(looked(run), None)
    assert message["terms"] == ["sentiment", "brevity"]
    assert message["rows"] == [
        {
            "place": 0,
            "prompt": "The film was",
            "response": " good.",
            "cut": False,
            "terms": [0.5, None],
            "reward": 0.75,
            "length": 3.0,
            "finish": "stop",
        }
    ]


def test_long_texts_and_many_rows_are_cut_and_a_row_can_be_had_in_full(run: FakeRun) -> None:
    rows = ROWS_SHOWN + 30
    columns: dict[str, list[Any]] = {
        "prompt": ["p" * 5_000] * rows,
        "response": ["r" * 30_000] * rows,
        "reward": [0.0] * rows,
    }
    path = write_rollouts(run.folder, 1, columns)
    run.events.write(events.rollouts(1, run.folder.relative(path), rows))
    state = looked(run)
    message = rollouts_message(state, None)
    assert len(message["rows"]) == ROWS_SHOWN
    assert message["total"] == rows
    assert len(message["rows"][0]["response"]) == RESPONSE_SHOWN
    assert message["rows"][0]["cut"] is True
    full = rollout_message(state, 1, 5)
    assert full["prompt"] == "p" * 5_000
    assert len(full["response"]) == FULL_TEXT_SHOWN
    assert "no longer" in rollout_message(state, 1, rows)["error"]


def test_a_table_that_was_deleted_is_said_so(run: FakeRun) -> None:
    run.take_step()
    run.folder.rollouts_of(1).unlink()
    message = rollouts_message(looked(run), None)
    assert message["rows"] == []
    assert "no longer in the run folder" in message["error"]
