"""Prompts drawn by a curriculum, in the place of `rlkit.data.PromptSource`."""

from __future__ import annotations

import difflib
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.curriculum.live import Edits, changed, rules_json
from rlkit.curriculum.mixture import PassRates, draw, weights_in
from rlkit.curriculum.progress import Move, Progress
from rlkit.curriculum.stages import Reaches, Stage
from rlkit.curriculum.state import generator_of, require_same
from rlkit.curriculum.view import pool_table, stage_table
from rlkit.data import PromptRow, PromptSource
from rlkit.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rlkit.curriculum.declaration import Curriculum

POOL_COLUMN = "pool"


class CurriculumSource:
    """A curriculum at work: draws prompts, watches what came of them, and moves from stage to stage.

    Rows are numbered through all pools, in the order of the pools. Which pool a prompt comes from is drawn from a
    random state of its own, so sampling responses is the same whatever the curriculum draws; in each pool, prompts come
    in shuffled epochs. Made by `Curriculum.open`.

    Args:
        curriculum: the declaration.
        tokenizer, seed, max_prompt_length: see `Curriculum.open`.

    Raises:
        DataError: a pool cannot be used, or has a column "pool" of its own.
    """

    def __init__(self, curriculum: Curriculum, tokenizer: Any, seed: int, max_prompt_length: int) -> None:
        self.stages: tuple[Stage, ...] = curriculum.stages
        self._options = curriculum.options()
        self._pools = {
            name: _open_pool(name, prompts, tokenizer, _seed_of_pool(seed, place), max_prompt_length)
            for place, (name, prompts) in enumerate(curriculum.pools.items())
        }
        self.rows: list[PromptRow] = []
        """Every prompt of every pool. A column that some rows lack is None there."""
        self._offsets: dict[str, int] = {}
        columns = {name: None for source in self._pools.values() for row in source.rows for name in row.columns}
        for pool, source in self._pools.items():
            self._offsets[pool] = offset = len(self.rows)
            self.rows += [
                replace(row, index=offset + row.index, columns={**columns, **row.columns, POOL_COLUMN: pool})
                for row in source.rows
            ]
        sizes = {name: len(source) for name, source in self._pools.items()}
        self._description = {**curriculum.describe(), "pools": sizes}
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, len(self._pools)])))
        self._pass_rates = PassRates(list(self._pools), curriculum.pass_at, curriculum.pass_decay)
        self._progress = Progress()
        self._edits = Edits(tuple(stage.until for stage in self.stages))
        self._history: list[dict[str, Any]] = [_entry(0, None, self.stages[0].name, "start")]
        self._metrics_checked = False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the pools' names, prompts and columns."""
        text = "\n".join(f"{name} {source.fingerprint}" for name, source in self._pools.items())
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools."""
        return tuple(self._pools)

    @property
    def stage(self) -> Stage:
        """The stage in force."""
        return self.stages[self._progress.stage]

    @property
    def stage_rewards(self) -> Any:
        """The `rewards` of the stage in force; None where it has none of its own."""
        return self.stage.rewards

    def next(self, n: int) -> list[PromptRow]:
        """The next `n` prompts by the mixture in force, each with its pool in `columns["pool"]`.

        Raises:
            ConfigError: `n` is less than 1.
        """
        if n < 1:
            raise ConfigError(f"expected to draw at least one prompt, given {n}")
        pools = draw(self._rng, self._weights(), n)
        return [self.rows[self._offsets[pool] + self._pools[pool].next(1)[0].index] for pool in pools]

    def observe(
        self, step: int, metrics: Mapping[str, float], rows: Sequence[int], rewards: Sequence[float | None]
    ) -> None:
        """Takes in what came of a step, and moves to another stage where a rule says so.

        Args:
            step: of the trainer, counted from 1.
            metrics: of the step. The curriculum's own, as after this step, are added.
            rows: `PromptRow.index` of each rollout, B.
            rewards: total reward of each rollout, B; NaN or None where all terms abstained.

        Raises:
            DataError: unequal lengths, or a row that does not exist.
        """
        if len(rows) != len(rewards):
            raise DataError(
                f"a curriculum needs one row and one reward per rollout, given {len(rows)} and {len(rewards)}"
            )
        if odd := [row for row in rows if not 0 <= row < len(self.rows)]:
            raise DataError(f"rollouts of rows {odd[:5]} were reported; this curriculum has rows 0 to {len(self) - 1}")
        self._pass_rates.add([self.rows[row].columns[POOL_COLUMN] for row in rows], rewards)
        known = {**metrics, **self.metrics()}
        self._check_metrics(step, known)
        self._progress = self._progress.observe(step, known, self._edits.rules)
        move = None if self._edits.hold else self._progress.due(self._edits.rules)
        if move is not None:
            self._move(move)

    def _move(self, move: Move) -> None:
        before = self.stage.name
        self._progress = self._progress.enter(move.to, by_hand=False)
        self._edits = replace(self._edits, pool_weights={})
        self._history.append(_entry(self._progress.step, before, self.stage.name, move.reason))

    def _check_metrics(self, step: int, known: Mapping[str, float]) -> None:
        """Warns once of a metric that a stage waits for and the first step does not report."""
        if self._metrics_checked:
            return
        self._metrics_checked = True
        names = {*known, *(f"curriculum/{pool}_pass_rate" for pool in self._pools)}
        for stage in self.stages:
            metric = stage.until.metric if isinstance(stage.until, Reaches) else None
            if metric is not None and metric not in names:
                near = difflib.get_close_matches(metric, names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                text = f"stage {stage.name!r} ends by the metric {metric!r}, which step {step} did not report{hint}"
                warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _weights(self) -> dict[str, float]:
        progress, floor = self._progress, self._options["pass_floor"]
        rates = self._pass_rates.rates()
        return weights_in(self.stage, progress.stage_steps, rates, floor, self._edits.pool_weights)

    def metrics(self) -> dict[str, float]:
        """`curriculum/stage` (index), `/stage_steps`, and by pool `/<pool>_share` of the next prompts and
        `/<pool>_pass_rate`, left out where no rollout of the pool has been scored."""
        weights, rates = self._weights(), self._pass_rates.rates()
        total = sum(weights.values())
        return {
            "curriculum/stage": float(self._progress.stage),
            "curriculum/stage_steps": float(self._progress.stage_steps),
            **{f"curriculum/{pool}_share": weight / total for pool, weight in weights.items()},
            **{f"curriculum/{pool}_pass_rate": rate for pool, rate in rates.items() if rate is not None},
        }

    def settings(self) -> dict[str, Any]:
        """What `set` can change, with the values in force, as JSON values: "stage" (name), "pool_weights", "hold" and
        "until" (by stage)."""
        return {
            "stage": self.stage.name,
            "pool_weights": self._weights(),
            "hold": self._edits.hold,
            "until": rules_json(self._edits, self.stages),
        }

    def set(self, changes: Mapping[str, Any]) -> None:
        """Changes the curriculum from the next prompt on; all changes or none.

        Args:
            changes: some of "stage": the name of a stage to jump to (what ended the stage before it brings nothing back
                then); "pool_weights": {pool: weight} in the place of the mixture's until the stage ends, None to take
                them back; "until": {stage: {field: value}}, such as {"mixed": {"value": 0.7}}; "hold": true to stay in
                the stage whatever happens.

        Raises:
            ConfigError: an unknown key, stage, pool or field (the nearest is named), or a value out of range.
        """
        floor = self._options["pass_floor"]
        before = self.stage.name
        progress, edits = changed(self._progress, self._edits, changes, self.stages, list(self._pools), floor)
        moved = progress.stage != self._progress.stage
        self._progress, self._edits = progress, edits
        if moved:
            self._history.append(_entry(progress.step, before, self.stage.name, "set by hand"))

    def history(self) -> list[dict[str, Any]]:
        """Changes of stage: {"step": step after which it was made, "from", "to", "reason"}; the first is the start."""
        return [dict(entry) for entry in self._history]

    def describe(self) -> dict[str, Any]:
        """The declaration as JSON values; see `Curriculum.describe`."""
        return dict(self._description)

    def _declared(self) -> dict[str, Any]:
        stages = [stage.describe() for stage in self.stages]
        return {"pools": list(self._pools), "stages": stages, "options": dict(self._options)}

    def state_dict(self) -> dict[str, Any]:
        """Plain values that say which prompt comes next and where the curriculum stands."""
        return {
            "declared": self._declared(),
            "pools": {name: source.state_dict() for name, source in self._pools.items()},
            "rng": self._rng.bit_generator.state,
            "progress": self._progress.state_dict(),
            "pass_rates": self._pass_rates.state_dict(),
            "edits": self._edits.state_dict(self.stages),
            "history": self.history(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the state was taken; nothing has changed when it raises.

        Raises:
            CheckpointError: other keys than `state_dict` gives, or the state of other pools or stages (it is said what
                differs).
            DataError: a pool holds other prompts.
        """
        require_same(state, self.state_dict())
        rng = generator_of(state["rng"])
        progress = Progress.from_state(state["progress"], len(self.stages))
        edits = Edits.from_state(state["edits"], self.stages, list(self._pools))
        self._pass_rates.load_state_dict(state["pass_rates"])
        for name, source in self._pools.items():
            source.load_state_dict(state["pools"][name])
        self._rng, self._progress, self._edits = rng, progress, edits
        self._history = [dict(entry) for entry in state["history"]]

    def __repr__(self) -> str:
        place = f"stage {self.stage.name!r} ({self._progress.stage + 1} of {len(self.stages)})"
        held = ", on hold" if self._edits.hold else ""
        shares = ", ".join(f"{pool} {self.metrics()[f'curriculum/{pool}_share']:.0%}" for pool in self._pools)
        return f"CurriculumSource({place}, {self._progress.stage_steps} steps in it{held}; {shares})"

    def _repr_html_(self) -> str:
        stages = stage_table(self.stages, self._edits.rules, self._progress.stage)
        return stages + pool_table(self._weights(), self._pass_rates.rates())


def _open_pool(name: str, prompts: Any, tokenizer: Any, seed: int, limit: int) -> PromptSource:
    try:
        source = PromptSource(prompts, tokenizer, seed, limit)
    except DataError as error:
        raise DataError(f"pool {name!r}: {error}") from error
    if any(POOL_COLUMN in row.columns for row in source.rows):
        raise DataError(f"pool {name!r} has a column {POOL_COLUMN!r}, which is the name of the pool itself; rename it")
    return source


def _seed_of_pool(seed: int, place: int) -> int:
    """A seed of its own for each pool, so that pools of one size are not shuffled alike."""
    if seed < 0:
        raise ConfigError(f"the seed of a curriculum must be 0 or more, given {seed}")
    return int(np.random.SeedSequence([seed, place]).generate_state(1)[0])


def _entry(step: int, before: str | None, after: str, reason: str) -> dict[str, Any]:
    return {"step": step, "from": before, "to": after, "reason": reason}
