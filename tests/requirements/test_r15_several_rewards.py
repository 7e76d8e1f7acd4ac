"""R15: the two orders of mixing several rewards. Groups of two; (r1, r2) are A = (0,0),(1,0) and B = (0,0),(1,1)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlkit import presets
from rlkit.algorithms.advantages import group_advantages
from rlkit.errors import ConfigError
from rlkit.rewards import mix
from tests.trainers.toys import grpo

TERMS = {"r1": torch.tensor([0.0, 1.0, 0.0, 1.0]), "r2": torch.tensor([0.0, 0.0, 0.0, 1.0])}
GROUPS = torch.tensor([0, 0, 1, 1])
BOTH = {"r1": "group", "r2": "group"}


def test_sum_then_normalise_cannot_tell_the_groups_apart() -> None:
    summed, _ = mix(TERMS, {"r1": 1.0, "r2": 1.0})
    assert summed.tolist() == [0.0, 1.0, 0.0, 2.0]
    assert group_advantages(summed, GROUPS).tolist() == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=1e-4)


def test_normalise_then_sum_can() -> None:
    mixed, _ = mix(TERMS, {"r1": 1.0, "r2": 1.0}, normalization=BOTH, groups=GROUPS)  # type: ignore[arg-type]
    assert mixed.tolist() == pytest.approx([-0.7071, 0.7071, -1.4142, 1.4142], abs=1e-4)


def test_weights_apply_after_normalising() -> None:
    mixed, _ = mix(TERMS, {"r1": 1.0, "r2": 0.5}, normalization=BOTH, groups=GROUPS)  # type: ignore[arg-type]
    assert mixed.tolist() == pytest.approx([-0.7071, 0.7071, -1.0607, 1.0607], abs=1e-4)


def test_a_loud_reward_does_not_drown_the_others() -> None:
    loud = {"r1": TERMS["r1"], "r2": 1000 * TERMS["r2"]}
    mixed, _ = mix(loud, {"r1": 1.0, "r2": 1.0}, normalization=BOTH, groups=GROUPS)  # type: ignore[arg-type]
    assert mixed.tolist() == pytest.approx([-0.7071, 0.7071, -1.4142, 1.4142], abs=1e-4)


@pytest.mark.parametrize("weights", [{}, {"r1": 1.0}, {"r1": 1.0, "r2": 1.0, "r3": 1.0}])
def test_a_wrong_number_of_weights_is_an_error(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="one weight per reward term"):
        mix(TERMS, weights)


# At the level of a trainer, on groups of two


def first(responses: list[str]) -> list[float]:
    return [0.0, 1.0, 0.0, 1.0]


def second(responses: list[str]) -> list[float]:
    return [0.0, 0.0, 0.0, 1.0]


def advantages(weights: dict[str, float] | None = None, **config: Any) -> list[float]:
    """What the actor of a trainer learns from, one number a response."""
    reward = {"r1": first, "r2": second}
    trainer = grpo(reward=reward, batch_size=4, group_size=2, reward_weights=weights, max_new_tokens=2, **config)
    trainer.follow_settings()
    batch, _ = trainer.gather()
    assert batch.reward_terms["r2"].tolist() == [0.0, 0.0, 0.0, 1.0]
    return batch.advantages[:, 0].tolist()  # type: ignore[no-any-return]


def test_a_trainer_offers_both_orders() -> None:
    summed = [-0.7071, 0.7071, -0.7071, 0.7071]
    assert advantages() == pytest.approx(summed, abs=1e-4)
    assert advantages({"r2": 0.5}) == pytest.approx(summed, abs=1e-4)
    gdpo = {**presets.GDPO, "whiten_advantages": False}
    assert advantages(**gdpo) == pytest.approx([-0.7071, 0.7071, -1.4142, 1.4142], abs=1e-4)
    assert advantages({"r2": 0.5}, **gdpo) == pytest.approx([-0.7071, 0.7071, -1.0607, 1.0607], abs=1e-4)


def test_a_trainer_takes_weights_of_its_own_terms_only() -> None:
    with pytest.raises(ConfigError, match="unknown reward term 'r3'"):
        advantages({"r1": 1.0, "r3": 1.0})
