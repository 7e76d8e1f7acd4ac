"""Checks that a saved state belongs to a curriculum before anything is taken from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlkit.errors import CheckpointError, DataError


def require_same(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuses a state of another curriculum.

    Args:
        state: as saved.
        own: the state of the curriculum that is to take it.

    Raises:
        CheckpointError: other keys, pools, stages or options; what differs is named.
        DataError: a pool holds other prompts.
    """
    if odd := sorted(set(state) ^ set(own)):
        raise CheckpointError(f"the state of a curriculum must have the keys of state_dict(); it differs in {odd}")
    if difference := _difference(state["declared"], own["declared"]):
        raise CheckpointError(f"the state was saved by another curriculum: {difference}")
    for name, pool in own["pools"].items():
        saved = state["pools"].get(name, {})
        if odd := sorted(set(saved) ^ set(pool)):
            raise CheckpointError(f"the saved state of pool {name!r} differs in its keys: {odd}")
        if saved["fingerprint"] != pool["fingerprint"]:
            raise DataError(
                f"the state was saved with other prompts in pool {name!r} (fingerprint {saved['fingerprint']}) than "
                f"these (fingerprint {pool['fingerprint']}). Give the same prompts in their order, or start a new run"
            )


def _difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """The first thing in which two declarations differ, in words; empty where they agree."""
    for key in ("pools", "options"):
        if saved.get(key) != own[key]:
            return f"its {key} are {saved.get(key)}, here {own[key]}"
    names, here = ([stage["name"] for stage in declared["stages"]] for declared in (saved, own))
    if names != here:
        return f"its stages are {names}, here {here}"
    for theirs, ours in zip(saved["stages"], own["stages"], strict=True):
        for key in ours:
            if theirs.get(key) != ours[key]:
                return f"{key} of stage {ours['name']!r} is {theirs.get(key)}, here {ours[key]}"
    return ""


def generator_of(state: Mapping[str, Any]) -> np.random.Generator:
    """A generator with a saved state. Raises CheckpointError where it is none."""
    bits = np.random.PCG64(0)
    try:
        bits.state = dict(state)  # type: ignore[assignment]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the saved random state of the curriculum cannot be used: {error}") from error
    return np.random.Generator(bits)
