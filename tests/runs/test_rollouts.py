"""Rollout tables: parquet that pandas opens without rlkit."""

import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rlkit.errors import RunError
from rlkit.runs.layout import RunFolder, write_status
from rlkit.runs.reader import RunReader
from rlkit.runs.rollouts import recorded_steps, write_rollouts


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.config.write_text("{}")
    write_status(folder, {"state": "running"})
    return folder


def test_columns_keep_their_types(folder: RunFolder):
    rollouts = {
        "row": [np.int64(3), 4],
        "prompt": ["wie gäht's", ""],
        "reward": [0.5, math.nan],
        "reward/joy": [1, None],
        "done": [True, False],
        "columns": [{"a": [1, 2]}, {}],
        "mixed": [1, "one"],
    }
    path = write_rollouts(folder, 12, rollouts)
    assert path == folder.root / "rollouts" / "step_000012.parquet"
    frame = pd.read_parquet(path)
    assert frame["step"].tolist() == [12, 12]
    assert frame["row"].tolist() == [3, 4]
    assert frame["prompt"].tolist() == ["wie gäht's", ""]
    assert frame["reward"].tolist()[0] == 0.5
    assert math.isnan(frame["reward"].tolist()[1])
    assert frame["reward/joy"].isna().tolist() == [False, True]
    assert frame["done"].tolist() == [True, False]
    assert frame["columns"].tolist() == ['{"a": [1, 2]}', "{}"]
    assert frame["mixed"].tolist() == ["1", '"one"']
    assert os.listdir(folder.rollouts) == ["step_000012.parquet"]


def test_columns_of_different_lengths_are_refused(folder: RunFolder):
    with pytest.raises(RunError, match=r"must all have 2 entries; got \{'b': 1\}"):
        write_rollouts(folder, 1, {"a": [1, 2], "b": [1]})


def test_steps_are_read_one_or_some_or_all(folder: RunFolder):
    reader = RunReader(folder.root)
    assert reader.rollouts().empty
    with pytest.raises(RunError, match="no step was recorded yet"):
        reader.rollouts(3)
    for step in (2, 5, 1_000_000):
        write_rollouts(folder, step, {"row": [step], "response": ["x"]})
    (folder.rollouts / ".step_000007.parquet.99").touch()
    assert recorded_steps(folder) == [2, 5, 1_000_000]
    assert reader.rollouts(5)["row"].tolist() == [5]
    assert reader.rollouts(last=2)["row"].tolist() == [5, 1_000_000]
    assert reader.rollouts()["row"].tolist() == [2, 5, 1_000_000]
    with pytest.raises(RunError, match=r"step 3 has no rollouts.*recorded: 2 to 1000000"):
        reader.rollouts(3)


def test_a_full_disk_leaves_no_half_table(folder: RunFolder):
    (folder.rollouts).mkdir()
    (folder.rollouts / f".step_000001.parquet.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_rollouts(folder, 1, {"row": [1]})
    assert recorded_steps(folder) == []
