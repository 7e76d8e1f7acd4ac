"""What `benchmarks/step.py` and `stages.py` print beside times: bounds, refusals, and what their ways are."""

from __future__ import annotations

import argparse
import importlib.util
from types import ModuleType

import pytest

from tests.runs.toys import repository

BENCHMARKS = repository() / "benchmarks"


def module_of(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark, with its neighbours in reach."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"{name}_table", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module_of("step", monkeypatch)


@pytest.mark.parametrize(("algorithm", "passes"), [("grpo", 1 + 1 / 3), ("ppo", 3)])
def test_the_bound_is_that_of_a_calculation_by_hand(step: ModuleType, algorithm: str, passes: float) -> None:
    """Width 64, 2 layers, 4 heads and 2 key heads of 16, MLP 128, vocabulary 49,152, 2 prompts of 3, 4 responses of 4.

    Weights: a layer has 4,160 (queries) + 2 * 2,080 (keys, values) + 4,096 + 3 * 8,192 + 2 * 64 = 37,120, and
    49,152 * 64 + 2 layers + 64 = 3,220,032 altogether. A column of the cache has 2 * 2 * 2 * 16 values, and a row 3 to
    7 columns. Tokens: 4 * 4 + 2 * 3. Pairs: 4 * 28, of which 2 * 6 belong to prompts that come again.
    """
    options = argparse.Namespace(shape="tiny", layers=None, groups=2, group=2, prompt=3, response=4)
    options.algorithm = algorithm
    sampling, rest = step.bounds(options)
    assert sampling == pytest.approx(4 * (3_220_032 * 2 + 4 * 5 * 128 * 2) / 4.3e12)
    assert rest == pytest.approx(passes * (6 * 3_220_032 * 22 + 12 * 100 * 2 * 64) / 989e12)


@pytest.mark.parametrize(("algorithm", "side"), [("ppo", "trl"), ("ppo", "verl"), ("grpo", "sequential")])
def test_sides_of_another_algorithm_are_refused(
    step: ModuleType, algorithm: str, side: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["step.py", "--algorithm", algorithm, "--sides", "rlkit", side])
    with pytest.raises(SystemExit):
        step.main()
    assert f"{side} would run another algorithm than {algorithm}" in capsys.readouterr().err


def test_ways_of_a_step_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six prompts two are short and greedy, two long and cut to the 50 likeliest tokens, and two as ever."""
    stages = module_of("stages", monkeypatch)
    workload = {"shape": "tiny", "layers": None, "groups": 6, "group": 2, "prompt": 8, "response": 3, "tokens": 40}
    options = argparse.Namespace(**workload, micro=4, steps=1)
    trainer = stages.trainer_of("adaptive", options, "cpu")
    trainer.follow_settings()
    batch = trainer.pipeline.run(trainer.draw())
    found = zip(batch.attention_mask.sum(1).tolist(), batch.temperatures.tolist(), batch.top_ks.tolist(), strict=True)
    assert sorted(set(found)) == [(2, 0.0, 0), (8, 1.0, 0), (32, pytest.approx(0.7), 50)]
    budgets = {way: stages.trainer_of(way, options, "cpu").learner.budget for way in ("grpo", "rows", "dynamic")}
    limits = {way: (budget.units, budget.tokens, budget.dynamic) for way, budget in budgets.items()}
    assert limits == {"grpo": (None, 40, False), "rows": (4, None, False), "dynamic": (None, None, True)}
