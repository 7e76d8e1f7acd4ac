"""Reward functions: how parameters decide the call, and what answers are refused."""

import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from rlkit.algorithms.advantages import group_advantages
from rlkit.errors import RewardError
from rlkit.rewards import RewardFunction, mix

PROMPTS, RESPONSES = ["p0", "p1", "p2", "p3"], ["a", "bb", "ccc", "dddd"]
COLUMNS: list[dict[str, Any]] = [{"answer": i, "level": "easy"} for i in range(4)]


def _score(fn: Callable[..., Any], name: str | None = None) -> list[float]:
    return RewardFunction(fn, name).score(PROMPTS, RESPONSES, COLUMNS)


class Unreadable:
    """A callable whose parameters cannot be found out."""

    __signature__ = "none"

    def __call__(self, response: str) -> float:
        return 0.0


# How parameters decide the call


def test_per_sample_with_one_parameter_of_any_name() -> None:
    def brevity(text: str) -> float:
        return 1 / len(text)

    reward = RewardFunction(brevity)
    assert (reward.name, reward.batched) == ("brevity", False)
    assert reward.score(PROMPTS, RESPONSES, COLUMNS) == [1.0, 0.5, 1 / 3, 0.25]


def test_per_sample_with_prompt_response_and_columns() -> None:
    seen = []

    def graded(prompt: str, response: str, answer: int, level: str = "none", scale: float = 2.0) -> float:
        seen.append((prompt, response, answer, level))
        return answer * scale

    assert _score(graded) == [0.0, 2.0, 4.0, 6.0]
    assert seen[2] == ("p2", "ccc", 2, "easy")


def test_batched_with_lists_and_the_rest_of_the_columns() -> None:
    seen: dict[str, Any] = {}

    def batched(prompts: list[str], responses: list[str], answer: list[int], **columns: list[Any]) -> list[float]:
        seen.update(prompts=prompts, answer=answer, **columns)
        return [float(len(response)) for response in responses]

    reward = RewardFunction(batched)
    assert reward.batched
    assert reward.score(PROMPTS, RESPONSES, COLUMNS) == [1.0, 2.0, 3.0, 4.0]
    assert seen == {"prompts": PROMPTS, "answer": [0, 1, 2, 3], "level": ["easy"] * 4}


def test_per_sample_takes_the_rest_of_the_columns_too() -> None:
    assert _score(lambda response, **columns: columns["answer"]) == [0.0, 1.0, 2.0, 3.0]
    assert _score(lambda prompts, **columns: columns["answer"]) == [0.0, 1.0, 2.0, 3.0]


def test_callables_of_every_kind() -> None:
    class Scorer:
        def __call__(self, response: str) -> float:
            return len(response)

        def method(self, responses: list[str]) -> list[int]:
            return [1] * len(responses)

    def scaled(response: str, scale: float) -> float:
        return scale * len(response)

    kinds: list[tuple[Any, str, list[float]]] = [
        (lambda response: 1, "reward", [1.0] * 4),
        (Scorer(), "Scorer", [1.0, 2.0, 3.0, 4.0]),
        (Scorer().method, "method", [1.0] * 4),
        (functools.partial(scaled, scale=2), "scaled", [2.0, 4.0, 6.0, 8.0]),
        (len, "len", [1.0, 2.0, 3.0, 4.0]),
    ]
    for fn, name, wanted in kinds:
        assert RewardFunction(fn).name == name
        assert _score(fn) == wanted
    assert RewardFunction(len, name="length").name == "length"


def test_a_column_that_some_rows_lack_is_none_there() -> None:
    reward = RewardFunction(lambda response, answer: None if answer is None else 1)
    scores = reward.score(["p", "p"], ["r", "r"], [{"answer": 3}, {}])
    assert scores[0] == 1
    assert math.isnan(scores[1])


def test_a_dataset_column_does_not_hide_the_text() -> None:
    reward = RewardFunction(lambda response, **columns: float(response == "r" and "response" not in columns))
    assert reward.score(["p"], ["r"], [{"response": "from the dataset"}]) == [1.0]


def test_no_samples_make_no_call() -> None:
    def fails(responses: list[str]) -> list[float]:
        raise AssertionError

    assert RewardFunction(fails).score([], [], []) == []


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda prompts, response: 0, r"mixes lists \['prompts'\] and single \['response'\]"),
        (lambda a, b: 0, r"'reward'\(a, b\) takes neither responses nor response"),
        (lambda respons, answer: 0, "Did you mean 'response'"),
        (lambda: 0, "takes neither responses nor response"),
        (lambda *args: 0, "takes neither responses nor response"),
        (lambda **columns: 0, "takes neither responses nor response"),
        (operator.add, "takes neither responses nor response"),
        (lambda prompt, response, /: 0, r"positional-only parameters \['prompt', 'response'\]"),
        (Unreadable(), "cannot read the parameters of reward 'Unreadable'"),
        ("text", "must be callable, given str 'text'"),
    ],
)
def test_parameters_that_cannot_be_filled_are_refused_at_once(fn: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        RewardFunction(fn)
    assert callable(fn) is ("Accepted are f(responses, ...)" in str(caught.value))


def test_bad_names_are_refused() -> None:
    for name in ("", "a/b"):
        with pytest.raises(RewardError, match="needs a name without '/'"):
            RewardFunction(len, name)


def test_async_functions_are_known_by_every_way_of_writing_them() -> None:
    async def judge(response: str) -> float:
        return len(response) / 2

    class Judge:
        async def __call__(self, response: str) -> float:
            return len(response) / 2

    for fn in (judge, Judge(), functools.partial(judge)):
        assert RewardFunction(fn).is_async
        assert _score(fn) == [0.5, 1.0, 1.5, 2.0]
    assert not RewardFunction(len).is_async
    with pytest.raises(RewardError, match="'reward' returned a coroutine; write it as `async def`"):
        _score(lambda response: judge(response))


def test_lengths_and_finish_reasons_are_given_to_whoever_asks() -> None:
    given = (PROMPTS, RESPONSES, COLUMNS, [3, 1, 4, 1], ["stop", "length", "stop", "stop"])

    def cut(response_length: int, finish_reason: str) -> float:
        return -response_length if finish_reason == "length" else response_length

    def batched(responses: list[str], response_lengths: list[int], finish_reasons: list[str]) -> list[float]:
        triples = zip(responses, response_lengths, finish_reasons, strict=True)
        return [n + len(r) * (why == "stop") for r, n, why in triples]

    assert RewardFunction(cut).score(*given) == [3.0, -1.0, 4.0, 1.0]
    assert RewardFunction(batched).score(*given) == [4.0, 1.0, 7.0, 5.0]
    assert RewardFunction(cut).needs == {"response_length", "finish_reason"}
    assert RewardFunction(batched).needs == {"response", "response_length", "finish_reason"}
    assert RewardFunction(lambda text: 0).needs == set()
    with pytest.raises(RewardError, match="'cut' asks for 'response_length', which was not given"):
        _score(cut)
    assert _score(lambda response, response_length=7: response_length) == [7.0] * 4


def test_a_length_comes_from_the_rollout_though_the_dataset_has_a_column_of_that_name() -> None:
    reward = RewardFunction(lambda response_length, **columns: response_length + 100 * ("response_length" in columns))
    assert reward.score(["p"], ["r"], [{"response_length": 9}], [2]) == [2.0]
    with pytest.raises(RewardError, match="which was not given"):
        reward.score(["p"], ["r"], [{"response_length": 9}])


def test_a_column_that_the_data_lacks_is_named() -> None:
    with pytest.raises(RewardError, match=r"'reward' asks for a column 'solution' .*columns: 'answer', 'level'"):
        _score(lambda response, solution: 0)


# What answers are refused


@pytest.mark.parametrize(
    "answer",
    [
        [True, 0, 1.5, np.float32(0.5)],
        [np.int64(1), np.bool_(False), torch.tensor(1.5), np.array(0.5)],
        (1, 0, 1.5, 0.5),
        np.array([1, 0, 1.5, 0.5]),
        torch.tensor([1, 0, 1.5, 0.5], requires_grad=True),
        pd.Series([1, 0, 1.5, 0.5]),
    ],
)
def test_numbers_of_every_kind_are_accepted(answer: Any) -> None:
    scores = _score(lambda responses: answer)
    assert scores == [1.0, 0.0, 1.5, 0.5]
    assert {type(score) for score in scores} == {float}


def test_none_abstains() -> None:
    for fn in (lambda responses: [1, None, 0, 1], lambda response: {"a": 1, "bb": None, "ccc": 0, "dddd": 1}[response]):
        scores = _score(fn)
        assert math.isnan(scores[1])
        assert [scores[i] for i in (0, 2, 3)] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "returned 1 rewards for 4 samples; expected one per sample"),
        ([1.0] * 5, "returned 5 rewards for 4 samples"),
        (1.0, "returned float 1.0; expected a list of 4"),
        (torch.tensor(1.0), r"returned Tensor .*; expected a list of 4"),
        (None, "returned NoneType None; expected a list of 4"),
        ("1234", "returned str '1234'; expected a list of 4"),
        ({"a": 1}, "returned dict .*; expected a list of 4"),
        ([1, "0.5", 0, 1], "returned str '0.5' for sample 1; expected a finite number, or None to abstain"),
        ([1, 1, math.nan, 1], "returned nan for sample 2"),
        ([1, 1, 1, math.inf], "returned inf for sample 3"),
        ([1, 1, 1, 10**400], "returned 10+ for sample 3; expected a finite number"),
        ([1, 1, 1e39, 1], r"returned 1e\+39 for sample 2; expected a finite number"),
        ([[1], [0], [1], [0]], r"returned list \[1\] for sample 0"),
        (np.ones((4, 1)), "returned list .* for sample 0"),
        ([torch.ones(1)] * 4, "returned Tensor .* for sample 0"),
        ([1j, 0, 0, 0], "returned complex 1j for sample 0"),
    ],
)
def test_wrong_answers_are_refused_by_function_and_sample(answer: Any, message: str) -> None:
    with pytest.raises(RewardError, match=f"reward 'mine' {message}"):
        _score(lambda responses: answer, "mine")


def test_wrong_per_sample_answers_are_refused() -> None:
    for value in ("high", math.nan, math.inf, [0.5], np.ones(1)):
        with pytest.raises(RewardError, match=r"reward 'mine' returned .* for sample 2; expected a finite"):
            _score(lambda response, value=value: value if response == "ccc" else 1, "mine")


def test_an_exception_names_function_and_sample_and_is_chained() -> None:
    def strict(response: str) -> float:
        return {"a": 1.0, "bb": 2.0}[response]

    with pytest.raises(RewardError, match="reward 'strict' raised KeyError on sample 2: 'ccc'") as caught:
        _score(strict)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RewardError, match=re.escape("reward 'reward' raised ZeroDivisionError: division by zero")):
        _score(lambda responses: 1 / 0)


def test_an_interrupt_is_not_taken_for_a_failing_reward() -> None:
    def interrupted(response: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _score(interrupted)


def test_abstentions_end_in_finite_advantages() -> None:
    terms = {"only": torch.tensor(_score(lambda responses: [1, 0, None, 1]))}
    rewards, valid = mix(terms, {"only": 1.0})
    advantages = group_advantages(rewards, torch.zeros(4, dtype=torch.int64), eps=1e-4, valid=valid)
    torch.testing.assert_close(advantages, torch.tensor([0.5773, -1.1545, 0.0, 0.5773]), atol=1e-4, rtol=0)


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(RewardError, match=r"given 2 responses and \{'prompts': 1, 'columns': 0\}"):
        RewardFunction(len).score(["p"], ["a", "b"], [])
