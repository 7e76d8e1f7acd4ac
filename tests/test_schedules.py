"""Learning rates and the adaptive KL coefficient: values by hand."""

import math
import subprocess
import sys

import pytest

from rlkit.errors import ConfigError, DataError
from rlkit.schedules import adapt_kl_coef, learning_rate


def _rates(kind: str, steps: int, **options: int) -> list[float]:
    return [learning_rate(kind, 8.0, step, **options) for step in range(steps)]


def test_constant_after_warm_up() -> None:
    assert _rates("constant", 3) == [8.0, 8.0, 8.0]
    assert _rates("constant", 6, warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_falls_to_zero_and_stays() -> None:
    assert _rates("linear", 6, total_steps=4) == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0]
    assert _rates("linear", 7, total_steps=6, warmup_steps=2) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]


def test_cosine_falls_to_zero_and_stays() -> None:
    part = 4 * math.cos(math.pi / 4)
    assert _rates("cosine", 7, total_steps=5, warmup_steps=1) == pytest.approx(
        [8.0, 8.0, 4 + part, 4.0, 4 - part, 0, 0]
    )


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown learning-rate schedule 'step'; expected constant, linear or cosine"):
        learning_rate("step", 1.0, 0)
    with pytest.raises(ConfigError, match="a cosine learning rate needs total_steps"):
        learning_rate("cosine", 1.0, 0)
    with pytest.raises(ConfigError, match=r"total_steps \(3\) must be more than warmup_steps \(3\)"):
        learning_rate("linear", 1.0, 3, warmup_steps=3, total_steps=3)


def test_adaptive_kl_by_hand() -> None:
    assert adapt_kl_coef(0.1, 2.0, 2.0, 100, 10) == pytest.approx(0.1)
    assert adapt_kl_coef(0.1, 2.2, 2.0, 100, 10) == pytest.approx(0.1 * 1.01)
    assert adapt_kl_coef(0.1, 50.0, 2.0, 100, 10) == pytest.approx(0.1 * 1.02)
    assert adapt_kl_coef(0.1, -3.0, 2.0, 100, 10) == pytest.approx(0.1 * 0.98)
    for kl in (math.nan, math.inf):
        with pytest.raises(DataError, match="measured KL must be finite"):
            adapt_kl_coef(0.1, kl, 2.0, 100, 4)


def test_schedules_and_fields_load_no_torch() -> None:
    code = "import sys, rlkit.schedules, rlkit.fields; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
