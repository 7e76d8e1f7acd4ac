"""R16: weights change at a step boundary, for all samples alike, and stay on record and in the state."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlkit.errors import ConfigError
from rlkit.rewards import RewardWeights
from rlkit.trainers.rollouts import RolloutTrainer
from tests.trainers.toys import good, grpo, ppo, short


def test_r16_weights_change_all_or_nothing() -> None:
    weights = RewardWeights({"tone": 1, "brevity": 0.5})
    before = weights.current
    weights.set({"brevity": 0.25})
    assert before == {"tone": 1.0, "brevity": 0.5}
    assert weights.current == {"tone": 1.0, "brevity": 0.25}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"tone": 9, "brevty": 1}, "unknown reward term 'brevty'; did you mean 'brevity'.*Terms are: tone, brevity"),
        ({"tone": 9, "brevity": math.nan}, "weight of reward term 'brevity' must be a finite number, given nan"),
        ({"tone": 9, "brevity": "1"}, "must be a finite number, given '1'"),
        ({"tone": True}, "must be a finite number, given True"),
        ({"tone": math.inf}, "must be a finite number, given inf"),
    ]
    for changes, message in bad:
        with pytest.raises(ConfigError, match=message):
            weights.set(changes)
        assert weights.current == {"tone": 1.0, "brevity": 0.25}
    weights.set({"tone": np.float64(2), "brevity": -1})
    assert weights.current == {"tone": 2.0, "brevity": -1.0}


def test_r16_a_snapshot_is_not_moved_by_a_later_change() -> None:
    weights = RewardWeights({"tone": 1.0})
    used = weights.current
    weights.set({"tone": 3.0})
    assert used == {"tone": 1.0}
    used["tone"] = 7.0
    assert weights.current == {"tone": 3.0}


def test_r16_changed_weights_are_still_in_force_after_a_resume() -> None:
    weights = RewardWeights({"tone": 1.0, "brevity": 0.5})
    weights.set({"tone": 0.1})
    resumed = RewardWeights({"tone": 1.0, "brevity": 0.5})
    resumed.load_state_dict(weights.state_dict())
    assert resumed.current == {"tone": 0.1, "brevity": 0.5}
    assert resumed.terms == ("tone", "brevity")


def totals(table: dict[str, list[Any]], weight: float) -> bool:
    """Whether every total of a table of rollouts is good + weight * short, raw terms as they came."""
    rows = zip(table["reward"], table["reward/good"], table["reward/short"], strict=True)
    assert len(set(table["reward/short"])) > 1 or table["reward/short"][0] != 0
    return all(total == pytest.approx(a + weight * b, abs=1e-6) for total, a, b in rows)


@pytest.mark.parametrize("build", [ppo, grpo])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["from a reward", "from another thread"])
def test_r16_a_change_while_a_step_is_running_waits_for_the_next(build: Any, elsewhere: bool) -> None:
    trainer: RolloutTrainer
    asked = 0

    def meddling(responses: list[str]) -> list[float]:
        nonlocal asked
        asked += 1
        if asked == 2:
            change = threading.Thread(target=lambda: trainer.set(reward_weights={"short": 0.25}, lr=1e-5))
            if elsewhere:
                change.start()
                change.join()
            else:
                change.run()
            assert trainer.settings()["reward_weights"] == {"good": 1.0, "short": 1.0}
        return good(responses)

    trainer = build(reward={"good": meddling, "short": short})
    tables = [trainer.step() for _ in range(3)]
    assert [totals(step.rollouts, weight) for step, weight in zip(tables, (1.0, 1.0, 0.25), strict=True)] == [True] * 3
    assert not totals(tables[1].rollouts, 0.25)
    assert [step.metrics["train/lr"] for step in tables] == pytest.approx([3e-3, 3e-3, 1e-5])
    assert trainer.settings()["reward_weights"] == {"good": 1.0, "short": 0.25}


def test_r16_an_invalid_change_while_a_step_is_running_is_refused_at_once() -> None:
    trainer: RolloutTrainer
    refused: list[str] = []

    def meddling(responses: list[str]) -> list[float]:
        for changes in ({"reward_weights": {"shrt": 2.0}}, {"reward_weights": {"short": math.nan}}, {"lr": -1.0}):
            with pytest.raises(ConfigError) as caught:
                trainer.set(**changes)
            refused.append(str(caught.value))
        return good(responses)

    trainer = ppo(reward={"good": meddling, "short": short})
    before = trainer.settings()
    trainer.step()
    assert len(refused) == 3
    assert trainer.settings() == before


def test_r16_changed_weights_survive_in_a_trainers_state() -> None:
    trainer, twin = (ppo(reward={"good": good, "short": short}) for _ in range(2))
    trainer.step()
    trainer.set(reward_weights={"short": 0.5})
    twin.load_state_dict(trainer.state_dict())
    assert twin.settings()["reward_weights"] == {"good": 1.0, "short": 0.5}
    assert totals(twin.step().rollouts, 0.5)


def test_r16_a_run_keeps_both_vectors_in_its_history(tmp_path: Path) -> None:
    trainer = ppo(reward={"good": good, "short": short})
    run = trainer.start(str(tmp_path / "exp"))
    run.pause().wait()
    old = run.step_count
    run.step(1).wait()
    answer = run.set(reward_weights={"short": 0.5}).wait()
    assert answer.state == "applied"
    run.step(1).wait()
    run.checkpoint().wait()
    run.stop()
    assert totals(run.reader.rollouts(old + 1), 1.0)
    assert totals(run.reader.rollouts(old + 2), 0.5)
    assert run.load().settings()["reward_weights"] == {"good": 1.0, "short": 0.5}
