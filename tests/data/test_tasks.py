"""Graded tasks: the same seed makes the same rows, levels differ as asked, and the scorer is the library's own."""

import json
import pickle
import re
import sys
from typing import Any

import pytest

from rlkit.data import PromptSource
from rlkit.data.tasks import Tasks, graded_tasks
from rlkit.errors import ConfigError, DataError, RewardError
from rlkit.rewards import RewardFunction
from tests.tiny import tiny_tokenizer

reasoning_gym = pytest.importorskip("reasoning_gym")

SUMS = {
    "easy": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "medium": {"min_terms": 3, "max_terms": 3, "min_digits": 2, "max_digits": 2},
    "hard": {"min_terms": 5, "max_terms": 6, "min_digits": 3, "max_digits": 3},
}
COUNTDOWN = {
    "easy": {"min_numbers": 2, "max_numbers": 2, "max_value": 9, "min_target": 1, "max_target": 81},
    "medium": {"min_numbers": 3, "max_numbers": 3, "max_value": 9, "min_target": 1, "max_target": 99},
    "hard": {"min_numbers": 4, "max_numbers": 4, "max_value": 20, "min_target": 10, "max_target": 99},
}
WORDS = {
    "easy": {"min_word_len": 3, "max_word_len": 3},
    "medium": {"min_word_len": 5, "max_word_len": 6},
    "hard": {"min_word_len": 8, "max_word_len": 10},
}


def _scores(tasks: Tasks, row: dict[str, Any], *responses: str) -> list[float]:
    count = len(responses)
    return RewardFunction(tasks.reward).score([row["prompt"]] * count, responses, [row] * count)


def test_sums_have_the_terms_and_digits_of_their_level_and_the_right_answer() -> None:
    tasks = graded_tasks("chain_sum", SUMS, size=40, seed=3)
    terms = {"easy": {2}, "medium": {3}, "hard": {5, 6}}
    digits = {"easy": 1, "medium": 2, "hard": 3}
    assert {level: len(rows) for level, rows in tasks.pools.items()} == {"easy": 40, "medium": 40, "hard": 40}
    for level, rows in tasks.pools.items():
        for row in rows:
            expression = re.fullmatch(r"State the final answer .*: ([-+ \d]+) =", row["prompt"])
            assert expression is not None
            numbers = re.findall(r"\d+", expression[1])
            assert len(numbers) in terms[level]
            assert {len(n) for n in numbers} == {digits[level]}
            # Worked out from the text, sign by sign: no word of the library's.
            signed = re.findall(r"([-+]?)\s*(\d+)", expression[1])
            assert int(row["answer"]) == sum(-int(n) if sign == "-" else int(n) for sign, n in signed)
            assert row["level"] == level
    assert {len(re.findall(r"\d+", row["prompt"])) for row in tasks.pools["hard"]} == {5, 6}


def test_words_have_the_length_of_their_level_and_partial_credit() -> None:
    tasks = graded_tasks("spell_backward", WORDS, size=20, seed=1)
    for level, rows in tasks.pools.items():
        low, high = WORDS[level].values()
        for row in rows:
            word = row["prompt"].rsplit(": ", 1)[1]
            assert row["answer"] == word[::-1]
            assert low <= len(word) <= high
    row = {"prompt": "", "answer": "tac", "level": "easy", "metadata": {}}
    # A letter in its place is worth a third; the library lowers the case.
    assert _scores(tasks, row, "tac", "TAC", "tap", "cat", "") == pytest.approx([1.0, 1.0, 2 / 3, 1 / 3, 0.0])


def test_countdown_takes_any_expression_with_the_numbers() -> None:
    tasks = graded_tasks("countdown", COUNTDOWN, size=20, seed=5)
    for level, count in (("easy", 2), ("medium", 3), ("hard", 4)):
        for row in tasks.pools[level]:
            assert len(row["metadata"]["numbers"]) == count
            assert _scores(tasks, row, row["answer"]) == [1.0]
    row = {"prompt": "", "answer": "7 + 3*2", "level": "medium", "metadata": {"numbers": [2, 3, 7], "target": 13}}
    # Right; right another way; a number left out; wrong value; no expression: the library's 0.05 and 0.01.
    given = ("7 + 3*2", "2*3 + 7", "10 + 3", "7 + 3 + 2", "thirteen apples")
    assert _scores(tasks, row, *given) == [1.0, 1.0, 0.05, 0.05, 0.01]


def test_an_answer_in_tags_is_found_and_without_tags_the_whole_response_counts() -> None:
    tasks = graded_tasks("chain_sum", SUMS, size=1)
    row = {"prompt": "", "answer": "16", "level": "easy", "metadata": {}}
    given = ("16", " 16\n", "<answer>16</answer>", "it is <answer> 3 </answer> no, <answer>16</answer>.", "it is 16")
    # Where the answer stands among other text, the library gives its share of the characters: 2 of 8.
    assert _scores(tasks, row, *given) == [1.0, 1.0, 1.0, 1.0, 0.25]
    with pytest.raises(RewardError, match="task 'chain_sum' has the levels easy, medium, hard, given 'odd'"):
        tasks.reward("16", "16", "odd", {})


def test_rows_are_plain_json_and_depend_on_the_seed_alone() -> None:
    for name, levels in (("chain_sum", SUMS), ("spell_backward", WORDS), ("countdown", COUNTDOWN)):
        first, again = (graded_tasks(name, levels, size=12, seed=9) for _ in range(2))
        assert first.pools == again.pools
        assert first.pools != graded_tasks(name, levels, size=12, seed=10).pools
        assert json.loads(json.dumps(first.pools)) == first.pools
    # Two levels with the same settings have tasks of their own.
    twins = graded_tasks("spell_backward", {"a": WORDS["hard"], "b": WORDS["hard"]}, size=20)
    assert len({row["answer"] for rows in twins.pools.values() for row in rows}) > 35


def test_the_library_s_own_scale_gets_harder() -> None:
    tasks = graded_tasks("chain_sum", size=10)
    assert {level: (s["min_terms"], s["max_terms"], s["max_digits"]) for level, s in tasks.levels.items()} == {
        "easy": (2, 2, 1),
        "medium": (3, 3, 2),
        "hard": (4, 4, 3),
    }
    top = graded_tasks("chain_sum", {"top": 99}, size=1).levels["top"]
    assert (top["min_terms"], top["max_terms"], top["max_digits"]) == (12, 12, 10)


def test_rows_are_prompts_and_the_reward_travels() -> None:
    tasks = graded_tasks("chain_sum", SUMS, size=5, template="Solve. {question} Put it in <answer> tags.")
    source = PromptSource(tasks.pools["hard"], tiny_tokenizer(), 0, 64)
    row = source.next(1)[0]
    assert row.text.startswith("Solve. State the final answer")
    assert row.text.endswith("= Put it in <answer> tags.")
    reward = RewardFunction(pickle.loads(pickle.dumps(tasks.reward)))
    assert reward.name == "chain_sum"
    answers = [f"<answer>{row.columns['answer']}</answer>", "no"]
    assert reward.score([row.text] * 2, answers, [row.columns] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "chain_sun"}, ConfigError, "unknown task key 'chain_sun'; did you mean 'chain_sum'"),
        ({"levels": {}}, ConfigError, "at least one level, given none"),
        ({"levels": {"easy": {"min_term": 2}}}, ConfigError, "'min_term'; did you mean 'min_terms'"),
        ({"levels": {"easy": {"seed": 2}}}, ConfigError, "unknown chain_sum level key 'seed'"),
        (
            {"levels": {"easy": {"min_terms": 0}}},
            ConfigError,
            "level 'easy' of task 'chain_sum': min_terms must be pos",
        ),
        ({"levels": {"easy": -1}}, ConfigError, "level 'easy' must be 0 or more"),
        ({"levels": {"easy": "simple"}}, ConfigError, "a dictionary of settings or a whole number, given 'simple'"),
        ({"size": 0}, ConfigError, "size of at least 1 and a seed of at least 0, given 0 and 0"),
        ({"seed": -1}, ConfigError, "given 200 and -1"),
        ({"template": "Solve:"}, ConfigError, "the template must hold {question}"),
        ({"name": "acre"}, ConfigError, "task 'acre' has no scale of its own"),
        ({"name": "rearc", "levels": {"a": {}}, "size": 1}, DataError, "its own answer .* only 0.05 once its row"),
        (
            {
                "name": "countdown",
                "levels": {"a": {**COUNTDOWN["easy"], "min_target": 900, "max_target": 901}},
            },
            DataError,
            "task 'countdown' cannot make number 0 of level 'a': Failed to generate .*Widen the level's settings",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        graded_tasks(**{"name": "chain_sum", **arguments})


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"need reasoning-gym: pip install 'rlkit-lab\[tasks\]'"):
        graded_tasks("chain_sum", SUMS)
