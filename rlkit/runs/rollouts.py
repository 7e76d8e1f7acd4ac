"""The rollouts of each step, one parquet file a step: plain columns that pandas opens without rlkit."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.errors import RunError
from rlkit.runs.events import plain
from rlkit.runs.layout import RunFolder
from rlkit.runs.protocol import rollout_count

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


def write_rollouts(folder: RunFolder, step: int, rollouts: Mapping[str, Sequence[Any]]) -> Path:
    """Write the rollouts of a step; the file appears only when it is whole.

    Args:
        rollouts: columns -> B entries each. Numbers, text and booleans keep their type; a column of anything
            else is stored as JSON text.

    Raises:
        RunError: the columns are not of one length.
        OSError: the disk is full.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = rollout_count(rollouts)
    wrong = {name: len(values) for name, values in rollouts.items() if len(values) != rows}
    if wrong:
        raise RunError(f"rollout columns must all have {rows} entries; got {wrong}")
    columns = {"step": pa.array([step] * rows, pa.int64())}
    columns.update({name: _column(values) for name, values in rollouts.items() if name != "step"})
    path = folder.rollouts_of(step)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as stream:
            pq.write_table(pa.table(columns), stream)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _column(values: Sequence[Any]) -> pa.Array:
    import pyarrow as pa

    items = [
        value if value is None or isinstance(value, str | bool | int | float) else _scalar(value) for value in values
    ]
    try:
        return pa.array(items)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return pa.array([None if item is None else json.dumps(plain(item), ensure_ascii=False) for item in items])


def _scalar(value: Any) -> Any:
    """A numpy number or 0-d tensor as a Python number; a nested value as JSON text."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            return item()
        except (TypeError, ValueError, RuntimeError):
            pass
    return json.dumps(plain(value), ensure_ascii=False)


def recorded_steps(folder: RunFolder) -> list[int]:
    """Steps that have a rollout table, ascending."""
    names = [path.stem.removeprefix("step_") for path in folder.rollouts.glob("step_*.parquet")]
    return sorted(int(name) for name in names if name.isdigit())


def read_rollouts(folder: RunFolder, step: int | None = None, last: int | None = None) -> pd.DataFrame:
    """One row per rollout, with its "step"; see `RunReader.rollouts`. Raises RunError when `step` was not recorded."""
    import pandas as pd

    steps = recorded_steps(folder)
    if step is not None:
        if step not in steps:
            known = f"recorded: {steps[0]} to {steps[-1]}" if steps else "no step was recorded yet"
            raise RunError(f"step {step} has no rollouts in {folder.root}; {known}.")
        steps = [step]
    elif last is not None:
        steps = steps[-last:] if last > 0 else []
    frames = [pd.read_parquet(folder.rollouts_of(number)) for number in steps]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
