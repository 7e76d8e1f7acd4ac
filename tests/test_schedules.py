"""Learning rates and the adaptive KL coefficient: values by hand, live changes, resume (R18)."""

import json
import math
import subprocess
import sys

import pytest

from rlkit.errors import CheckpointError, ConfigError, DataError
from rlkit.schedules import AdaptiveKL, ConstantRate, CosineRate, LearningRate, LinearRate, adapt_kl_coef, learning_rate


def _run(rate: LearningRate, steps: int) -> list[float]:
    values = []
    for _ in range(steps):
        values.append(rate.value)
        assert rate.step() == rate.value
    return values


def test_constant_after_warm_up() -> None:
    assert _run(ConstantRate(8.0), 3) == [8.0, 8.0, 8.0]
    assert _run(ConstantRate(8.0, warmup_steps=4), 6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_falls_to_zero_and_stays() -> None:
    assert _run(LinearRate(8.0, total_steps=4), 6) == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0]
    assert _run(LinearRate(8.0, total_steps=6, warmup_steps=2), 7) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]


def test_cosine_falls_to_zero_and_stays() -> None:
    values = _run(CosineRate(8.0, total_steps=5, warmup_steps=1), 7)
    assert values == pytest.approx([8.0, 8.0, 4 + 4 * math.cos(math.pi / 4), 4.0, 4 - 4 * math.cos(math.pi / 4), 0, 0])


def test_a_live_change_of_the_peak_scales_the_curve() -> None:
    rate = LinearRate(8.0, total_steps=4)
    _run(rate, 2)
    rate.peak = 16.0
    assert _run(rate, 3) == [8.0, 4.0, 0.0]
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="learning rate must be a finite number of 0 or more"):
            rate.peak = bad
    assert rate.peak == 16.0


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("saved_at", [0, 2, 3, 9])
def test_r18_a_resumed_schedule_goes_on_where_it_was(kind: str, saved_at: int) -> None:
    straight = learning_rate(kind, 1e-3, warmup_steps=3, total_steps=10)
    _run(straight, saved_at)
    straight.peak = 5e-4
    resumed = learning_rate(kind, 1e-3, warmup_steps=3, total_steps=10)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.steps == saved_at
    assert _run(resumed, 12) == _run(straight, 12)


def test_the_named_schedules() -> None:
    kinds = {"constant": ConstantRate, "linear": LinearRate, "cosine": CosineRate}
    for kind, wanted in kinds.items():
        assert type(learning_rate(kind, 1.0, total_steps=2)) is wanted
    with pytest.raises(ConfigError, match="unknown learning-rate schedule 'step'; expected constant, linear or cosine"):
        learning_rate("step", 1.0)
    with pytest.raises(ConfigError, match="a cosine learning rate needs total_steps"):
        learning_rate("cosine", 1.0)
    with pytest.raises(ConfigError, match=r"total_steps \(3\) must be more than warmup_steps \(3\)"):
        learning_rate("linear", 1.0, warmup_steps=3, total_steps=3)
    with pytest.raises(ConfigError, match="warmup_steps must be 0 or more"):
        learning_rate("constant", 1.0, warmup_steps=-1)


def test_adaptive_kl_by_hand() -> None:
    controller = AdaptiveKL(0.1, target=2.0, horizon=100)
    assert controller.update(2.0, 10) == pytest.approx(0.1)
    assert controller.update(2.2, 10) == pytest.approx(0.1 * 1.01)
    assert controller.update(50.0, 10) == pytest.approx(0.1 * 1.01 * 1.02)
    assert controller.update(0.0, 10) == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
    assert controller.value == adapt_kl_coef(0.1 * 1.01 * 1.02, -3.0, 2.0, 100, 10)


def test_r18_a_resumed_controller_goes_on_where_it_was() -> None:
    straight = AdaptiveKL(0.1, target=2.0, horizon=100)
    straight.update(9.0, 16)
    straight.target = 3.0
    resumed = AdaptiveKL(0.1, target=2.0, horizon=50)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.value == straight.value != 0.1
    assert resumed.update(4.0, 16) == straight.update(4.0, 16)
    assert resumed.state_dict() == straight.state_dict()


def test_a_kl_that_is_not_finite_leaves_the_coefficient_alone() -> None:
    controller = AdaptiveKL(0.1, target=2.0, horizon=100)
    for kl in (math.nan, math.inf):
        with pytest.raises(DataError, match="measured KL must be finite"):
            controller.update(kl, 4)
    assert controller.value == 0.1


def test_coefficients_that_cannot_steer_are_refused() -> None:
    for values, name in (((0.0, 1.0, 1.0), "initial"), ((0.1, 0.0, 1.0), "target"), ((0.1, 1.0, math.nan), "horizon")):
        with pytest.raises(ConfigError, match=f"{name} of the adaptive KL coefficient must be a finite number above 0"):
            AdaptiveKL(*values)
    controller = AdaptiveKL(0.1, 1.0, 1.0)
    controller.value = 0.2
    assert controller.value == 0.2
    with pytest.raises(ConfigError, match="value of the adaptive KL"):
        controller.value = 0.0


def test_states_with_other_keys_are_refused() -> None:
    for owner in (ConstantRate(1.0), AdaptiveKL(0.1, 1.0, 1.0)):
        state = owner.state_dict()
        for bad in ({**state, "extra": 1}, dict(list(state.items())[1:])):
            with pytest.raises(CheckpointError, match=f"state of {type(owner).__name__} must have the keys"):
                owner.load_state_dict(bad)
        assert owner.state_dict() == state


def test_schedules_and_fields_load_no_torch() -> None:
    code = "import sys, rlkit.schedules, rlkit.fields; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
