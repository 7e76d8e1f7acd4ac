"""A curriculum as a user writes it down: pools of prompts, and stages that mix them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from rlkit.config_fields import refuse_unknown
from rlkit.curriculum.mixture import require_weight
from rlkit.curriculum.source import CurriculumSource
from rlkit.curriculum.stages import Reaches, Stage, number
from rlkit.curriculum.view import stage_table
from rlkit.errors import ConfigError


class Curriculum:
    """Prompts in pools of different difficulty, mixed stage by stage.

    It stands where a trainer takes prompts:

        prompts=Curriculum(
            {"easy": easy_rows, "hard": hard_rows},
            [
                Stage("warm-up", {"easy": 1.0}, until=Steps(20)),
                Stage("mixed", {"easy": 0.5, "hard": Ramp(0.1, 0.5, 50)},
                      until=Reaches("curriculum/easy_pass_rate", 0.8, for_steps=3, falls_back_below=0.5)),
                Stage("all", "by_pass_rate"),
            ],
        )

    Args:
        pools: prompts by name, each anything that `rlkit.data.PromptSource` takes. A column that one pool has and
            another lacks is None there, and every row gets the name of its pool as "pool".
        stages: in order; all but the last say what ends them.
        pass_at: least reward that counts as passed in a pool's pass rate.
        measure: metric that a `Reaches` without one watches.
        pass_decay: what is left of a rollout's weight in its pool's pass rate after one more rollout of that pool;
            0.99 looks back over about 100 rollouts.
        pass_floor: added to p (1 - p) in a stage with the mixture "by_pass_rate", so that no pool is given up.

    Raises:
        ConfigError: no or empty pools, no stages or two of one name, an unknown pool (the nearest is named), no
            positive weight, a middle stage without end or a last one with an end, or a value out of range.
    """

    def __init__(
        self,
        pools: Mapping[str, Any],
        stages: Sequence[Stage],
        *,
        pass_at: float = 1.0,
        measure: str = "reward/mean",
        pass_decay: float = 0.99,
        pass_floor: float = 0.05,
    ) -> None:
        pass_at, pass_decay = number(pass_at, "pass_at"), number(pass_decay, "pass_decay")
        pass_floor = number(pass_floor, "pass_floor")
        if not 0.0 < pass_decay < 1.0:
            raise ConfigError(f"pass_decay must lie between 0 and 1, both excluded, given {pass_decay!r}")
        if not pass_floor > 0.0:
            raise ConfigError(f"pass_floor must be above 0, given {pass_floor!r}; at 0 a solved pool never comes back")
        self.pools = dict(pools)
        self.pass_at, self.measure, self.pass_decay, self.pass_floor = pass_at, measure, pass_decay, pass_floor
        _check_pools(self.pools)
        self.stages: tuple[Stage, ...] = tuple(self._with_measure(stage) for stage in stages)
        """The stages, each `Reaches` with its metric filled in."""
        self._check_stages()

    def _with_measure(self, stage: Stage) -> Stage:
        if not isinstance(stage, Stage):
            raise ConfigError(f"stages must be Stage(name, mixture, until=...), given {stage!r:.80}")
        if isinstance(stage.until, Reaches) and stage.until.metric is None:
            return dataclasses.replace(stage, until=dataclasses.replace(stage.until, metric=self.measure))
        return stage

    def _check_stages(self) -> None:
        if not self.stages:
            raise ConfigError("a curriculum needs at least one stage, given none")
        names = [stage.name for stage in self.stages]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"stage names must differ, given {twice} more than once")
        for stage in self.stages:
            if not isinstance(stage.mixture, str):
                refuse_unknown(stage.mixture, self.pools, what=f"pool in stage {stage.name!r}:")
            require_weight(stage, list(self.pools), self.pass_floor, {})
        for stage in self.stages[:-1]:
            if stage.until is None:
                raise ConfigError(f"stage {stage.name!r} never ends, and others follow: until=Steps(n) or Reaches(...)")
        if self.stages[-1].until is not None:
            raise ConfigError(
                f"stage {names[-1]!r} is the last one and has nothing to go on to; leave its until out, or add a stage"
            )

    def open(self, tokenizer: Any, seed: int, max_prompt_length: int) -> CurriculumSource:
        """Reads and tokenises the pools.

        Args:
            tokenizer: of the policy.
            seed: decides which pool each prompt comes from, and the order in each pool.
            max_prompt_length: longest prompt in tokens.

        Raises:
            DataError: a pool cannot be used; it is named, and so is the row.
        """
        return CurriculumSource(self, tokenizer, seed, max_prompt_length)

    def describe(self) -> dict[str, Any]:
        """The whole declaration as JSON values: pools by size (None for a file), stages, and what counts as passed."""
        sizes = {
            name: None if isinstance(pool, str) or not isinstance(pool, Sized) else len(pool)
            for name, pool in self.pools.items()
        }
        stages = [{**stage.describe(), "rewards": _labels(stage.rewards)} for stage in self.stages]
        return {"pools": sizes, "stages": stages, **self.options()}

    def options(self) -> dict[str, Any]:
        """The settings that hold for all stages."""
        return {
            "pass_at": self.pass_at,
            "measure": self.measure,
            "pass_decay": self.pass_decay,
            "pass_floor": self.pass_floor,
        }

    def __repr__(self) -> str:
        return f"Curriculum(pools: {', '.join(self.pools)}; stages: {' → '.join(s.name for s in self.stages)})"

    def _repr_html_(self) -> str:
        return stage_table(self.stages, [stage.until for stage in self.stages])


def _check_pools(pools: Mapping[str, Any]) -> None:
    if not pools:
        raise ConfigError("a curriculum needs at least one pool of prompts, given none")
    for name, pool in pools.items():
        if not isinstance(name, str) or not name.strip() or "/" in name:
            raise ConfigError(f"a pool needs a name without '/', given {name!r}")
        if not isinstance(pool, str) and isinstance(pool, Sized) and len(pool) == 0:
            raise ConfigError(f"pool {name!r} is empty; give it at least one prompt, or leave it out")


def _labels(rewards: Any) -> Any:
    """Names of a stage's rewards, for people and for config.json."""
    if rewards is None:
        return None
    if isinstance(rewards, Mapping):
        return [str(name) for name in rewards]
    if isinstance(rewards, list | tuple):
        return [_labels(reward) if not isinstance(reward, float | int) else reward for reward in rewards]
    return str(getattr(rewards, "name", None) or getattr(rewards, "__name__", None) or type(rewards).__name__)
