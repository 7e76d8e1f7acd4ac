"""Graded tasks with verifiable answers, made by `reasoning-gym` (Stojanovski et al. 2025, arXiv:2505.24760).

Installed with `pip install 'rlkit-lab[tasks]'`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlkit.config_fields import refuse_unknown
from rlkit.errors import ConfigError, DataError, RewardError

__all__ = ["TaskReward", "Tasks", "graded_tasks"]

_LEVELS: dict[str, int] = {"easy": 0, "medium": 1, "hard": 2}


@dataclass(frozen=True)
class Tasks:
    """Tasks of one kind at several levels.

    Attributes:
        name: of the kind, as the library calls it.
        levels: settings of each level, in the library's terms, as JSON values.
        pools: rows of each level, JSON values: {"prompt", "answer", "level", "metadata"}. Goes into
            `Curriculum(tasks.pools, ...)`; a single level's rows are prompts for a trainer.
        reward: scores responses, a reward function for a trainer.
    """

    name: str
    levels: dict[str, dict[str, Any]]
    pools: dict[str, list[dict[str, Any]]]
    reward: TaskReward


class TaskReward:
    """The library's own scorer as a reward function: 1 for a right answer, less for a near or a wrong one.

    What stands between the last <answer> and </answer> of the response is scored, or the whole response where there
    are no such tags. Some kinds (countdown) read the answer as an expression with sympy, whose parser evaluates it as
    Python: what the policy wrote is run, and a huge power can keep it busy. Score such kinds in a process that may
    touch nothing of worth, under a time limit.

    Args:
        name: of the kind of task.
        levels: settings of each level, as in `Tasks.levels`.
    """

    def __init__(self, name: str, levels: Mapping[str, Mapping[str, Any]]) -> None:
        self.__name__ = name
        self._levels = {level: dict(settings) for level, settings in levels.items()}
        self._scorers: dict[str, Any] = {}

    def __call__(self, response: str, answer: str, level: str, metadata: Mapping[str, Any]) -> float:
        """The score of a response.

        Args:
            response: text of the policy.
            answer, level, metadata: columns of the row.

        Raises:
            RewardError: a level that these tasks do not have.
            ConfigError: the library is missing.
        """
        if level not in self._levels:
            raise RewardError(f"task {self.__name__!r} has the levels {', '.join(self._levels)}, given {level!r}")
        if level not in self._scorers:
            self._scorers[level] = _dataset(self.__name__, level, self._levels[level])
        extracted = _library().utils.extract_answer(response)
        given = response.strip() if extracted is None else extracted
        return float(self._scorers[level].score_answer(given, {"answer": answer, "metadata": dict(metadata)}))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scorers": {}}

    def __repr__(self) -> str:
        return f"TaskReward({self.__name__!r}, levels: {', '.join(self._levels)})"


def graded_tasks(
    name: str,
    levels: Mapping[str, Mapping[str, Any] | int] | None = None,
    *,
    size: int = 200,
    seed: int = 0,
    template: str = "{question}",
) -> Tasks:
    """Makes tasks of one kind at several levels of difficulty. The same arguments make the same rows.

    Args:
        name: kind of task in the library, such as "chain_sum", "countdown" or "spell_backward".
        levels: for each level, settings of that kind ({"min_terms": 2, "max_terms": 3, ...}), or a whole number k for
            the library's own scale: every attribute of the kind's curriculum at its k-th level, or its last one where
            it has fewer. None takes {"easy": 0, "medium": 1, "hard": 2}.
        size: rows a level. Tasks of a small kind come more than once.
        seed: decides the tasks. Each level has a stream of its own, far from the others'.
        template: text around the task; "{question}" stands for it.

    Raises:
        ConfigError: the library is missing, an unknown kind or setting (the nearest is named), no level, a setting out
            of range, or a kind without a scale of its own where one is asked for.
        DataError: the settings make no tasks, or the library's scorer does not accept its own answers once saved.
    """
    if size < 1 or seed < 0:
        raise ConfigError(f"graded tasks need a size of at least 1 and a seed of at least 0, given {size} and {seed}")
    if "{question}" not in template:
        raise ConfigError(f"the template must hold {{question}} where the task goes, given {template!r}")
    refuse_unknown([name], _library().factory.DATASETS, what="task")
    given = dict(_LEVELS if levels is None else levels)
    if not given:
        raise ConfigError("graded tasks need at least one level, given none")
    settings: dict[str, dict[str, Any]] = {}
    pools: dict[str, list[dict[str, Any]]] = {}
    for place, (level, wanted) in enumerate(given.items()):
        own = {"seed": int(np.random.SeedSequence([seed, place]).generate_state(1)[0]), "size": size}
        chosen = _scale(name, level, wanted) if isinstance(wanted, int) else _checked(name, wanted)
        settings[level] = {**chosen, **own}
        pools[level] = _rows(name, level, settings[level], template)
    reward = TaskReward(name, settings)
    for level, rows in pools.items():
        _require_right(reward, level, rows[0])
    return Tasks(name, settings, pools, reward)


def _library() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError as error:
        raise ConfigError("graded tasks need reasoning-gym: pip install 'rlkit-lab[tasks]'") from error
    return reasoning_gym


def _checked(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"a level of task {name!r} is a dictionary of settings or a whole number, given {settings!r}")
    config = _library().factory.DATASETS[name][1]
    known = [entry.name for entry in dataclasses.fields(config) if entry.name not in ("seed", "size")]
    refuse_unknown(settings, known, what=f"{name} level")
    return _plain(name, dict(settings))


def _scale(name: str, level: str, k: int) -> dict[str, Any]:
    """Settings at the k-th level of the library's own curriculum for the kind."""
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

    factory = _library().factory
    if not factory.has_curriculum(name):
        raise ConfigError(f"task {name!r} has no scale of its own; give the settings of each level")
    if k < 0:
        raise ConfigError(f"level {level!r} must be 0 or more on the library's scale, given {k}")
    curriculum = factory.create_curriculum(name)
    for attribute, definition in curriculum.attributes.items():
        curriculum.set_attr_level(attribute, min(k, len(definition.levels) - 1))
    context = DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
    config = curriculum.generate_configuration(context=context)
    values = {e.name: getattr(config, e.name) for e in dataclasses.fields(config) if e.name not in ("seed", "size")}
    return _plain(name, values)


def _dataset(name: str, level: str, settings: Mapping[str, Any]) -> Any:
    try:
        return _library().create_dataset(name, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"level {level!r} of task {name!r}: {error} (settings {dict(settings)})") from error


def _rows(name: str, level: str, settings: Mapping[str, Any], template: str) -> list[dict[str, Any]]:
    dataset = _dataset(name, level, settings)
    rows = []
    for index in range(settings["size"]):
        try:
            entry = dataset[index]
        except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
            raise DataError(
                f"task {name!r} cannot make number {index} of level {level!r}: {error}. Widen the level's settings "
                f"{dict(settings)}"
            ) from error
        prompt = template.replace("{question}", entry["question"])
        row = {"prompt": prompt, "answer": entry["answer"], "level": level, "metadata": entry["metadata"]}
        rows.append(_plain(name, row))
    return rows


def _plain(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values as JSON keeps them: tuples become lists."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"task {name!r} has values that cannot be saved as JSON: {error}") from error
    return plain


def _require_right(reward: TaskReward, level: str, row: Mapping[str, Any]) -> None:
    """Raises DataError where the library has an answer and does not accept it from a saved row."""
    if row["answer"] is None:
        return
    score = reward(f"<answer>{row['answer']}</answer>", row["answer"], level, row["metadata"])
    if score < 1.0:
        raise DataError(
            f"the scorer of task {reward.__name__!r} gives its own answer {row['answer']!r:.80} only {score:g} once "
            "its row is saved as JSON; this kind cannot be used"
        )
