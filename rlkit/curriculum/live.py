"""What can be changed about a curriculum while a run goes on, and how a change is checked before anything moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlkit.config_fields import refuse_unknown
from rlkit.curriculum.mixture import require_weight
from rlkit.curriculum.progress import Progress, Watch
from rlkit.curriculum.stages import Stage, Until, edited_rule, rule_json, weight
from rlkit.errors import CheckpointError, ConfigError

SETTINGS = ("stage", "pool_weights", "until", "hold")


@dataclass(frozen=True)
class Edits:
    """What is in force beside the declaration. Immutable: a change gives a new one."""

    rules: tuple[Until | None, ...]
    """What ends each stage."""
    pool_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights set by hand; forgotten when the stage ends."""
    hold: bool = False
    """No stage ends by itself."""

    def state_dict(self, stages: Sequence[Stage]) -> dict[str, Any]:
        """{"rules": {stage: values}, "pool_weights", "hold"}."""
        rules = {stage.name: rule_json(rule) for stage, rule in zip(stages, self.rules, strict=True)}
        return {"rules": rules, "pool_weights": dict(self.pool_weights), "hold": self.hold}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], stages: Sequence[Stage], pools: Sequence[str]) -> Edits:
        """Takes back what `state_dict` gave. Raises CheckpointError for what cannot be of these stages and pools."""
        if set(state) != {"rules", "pool_weights", "hold"}:
            raise CheckpointError(
                f"saved edits of a curriculum hold rules, pool_weights and hold, given {sorted(state)}"
            )
        try:
            refuse_unknown(state["rules"], [stage.name for stage in stages], what="saved stage")
            refuse_unknown(state["pool_weights"], pools, what="saved pool")
            rules = [
                stage.until if stage.until is None else edited_rule(stage.name, stage.until, state["rules"][stage.name])
                for stage in stages
            ]
        except (ConfigError, KeyError) as error:
            raise CheckpointError(f"the saved edits do not fit this curriculum: {error}") from error
        return cls(tuple(rules), dict(state["pool_weights"]), bool(state["hold"]))


def changed(
    progress: Progress,
    edits: Edits,
    changes: Mapping[str, Any],
    stages: Sequence[Stage],
    pools: Sequence[str],
    floor: float,
) -> tuple[Progress, Edits]:
    """Progress and edits after a change by hand; those given are left as they are.

    Args:
        changes: some of "stage" (name to jump to; the one in force changes nothing), "pool_weights" ({pool: weight}
            until the stage ends, pools left out keep theirs; None takes all such weights back), "until" ({stage:
            {field: value}} of its `Steps` or `Reaches`) and "hold" (true stops all moves but jumps).
        stages, pools, floor: of the curriculum.

    Raises:
        ConfigError: an unknown key, stage, pool or field (the nearest is named), or a value out of range.
    """
    if not isinstance(changes, Mapping) or not changes:
        raise ConfigError(
            f"a change to a curriculum is a dictionary with some of {', '.join(SETTINGS)}, given {changes!r}"
        )
    refuse_unknown(changes, SETTINGS, what="curriculum")
    names = [stage.name for stage in stages]
    if "stage" in changes:
        refuse_unknown([changes["stage"]], names, what="stage")
        if (to := names.index(changes["stage"])) != progress.stage:
            progress, edits = progress.enter(to, by_hand=True), replace(edits, pool_weights={})
    if "until" in changes:
        progress, edits = _with_rules(progress, edits, changes["until"], names)
    if "hold" in changes:
        if not isinstance(changes["hold"], bool):
            raise ConfigError(f"hold must be true or false, given {changes['hold']!r}")
        edits = replace(edits, hold=changes["hold"])
    if "pool_weights" in changes:
        weights = _weights(edits, changes["pool_weights"], pools)
        require_weight(stages[progress.stage], pools, floor, weights)
        edits = replace(edits, pool_weights=weights)
    return progress, edits


def _weights(edits: Edits, given: Any, pools: Sequence[str]) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"pool_weights must be {{pool: weight}}, or None to take them back, given {given!r}")
    refuse_unknown(given, pools, what="pool")
    return {**edits.pool_weights, **{pool: weight(w, f"weight of pool {pool!r}") for pool, w in given.items()}}


def _with_rules(progress: Progress, edits: Edits, given: Any, names: Sequence[str]) -> tuple[Progress, Edits]:
    """New rules; what was counted against an old threshold is counted anew."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"until must be {{stage: {{field: value}}}}, given {given!r}")
    refuse_unknown(given, names, what="stage")
    rules = list(edits.rules)
    for index, name in enumerate(names):
        if name in given and not (given[name] is None and rules[index] is None):
            rules[index] = edited_rule(name, rules[index], given[name])
    here = progress.stage
    if rules[here] != edits.rules[here]:
        progress = replace(progress, reached=Watch(progress.reached.average))
    if here > 0 and rules[here - 1] != edits.rules[here - 1]:
        progress = replace(progress, fallen=Watch(progress.fallen.average))
    return progress, replace(edits, rules=tuple(rules))


def rules_json(edits: Edits, stages: Sequence[Stage]) -> dict[str, dict[str, Any]]:
    """The rules in force by stage, without the last stage, which has none; a metric is part of a rule but fixed."""
    pairs = zip(stages, edits.rules, strict=True)
    return {stage.name: values for stage, rule in pairs if (values := rule_json(rule)) is not None}
