"""Nested state as files and back."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.errors import CheckpointError
from rlkit.runs.state_files import pack, read_frozen, read_tensors, unpack, write_frozen, write_tensors

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.text(max_size=8) | st.integers() | st.sampled_from(["$tensor", "$tuple", "$items", "$float"])
TREES = st.recursive(
    LEAVES,
    lambda child: (
        st.lists(child, max_size=3) | st.lists(child, max_size=3).map(tuple) | st.dictionaries(KEYS, child, max_size=3)
    ),
    max_leaves=12,
)


def there_and_back(state: Any) -> Any:
    packed = pack(state, private=False)
    tree = json.loads(json.dumps(packed.tree, allow_nan=False))
    return unpack(tree, lambda file, name: packed.files[file][name])


@settings(max_examples=60, deadline=None)
@given(state=st.dictionaries(KEYS, TREES, max_size=4))
def test_plain_values_come_back_as_they_were(state: dict[Any, Any]):
    assert repr(there_and_back(state)) == repr(state)


def test_the_state_of_an_optimizer_comes_back():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, betas=(0.5, 0.75))
    parameter.sum().backward()
    optimizer.step()
    back = there_and_back({"optimizer": optimizer.state_dict()})["optimizer"]
    assert back["param_groups"] == optimizer.state_dict()["param_groups"]
    assert list(back["state"]) == [0]
    for name, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(back["state"][0][name], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_tensors_keep_type_shape_and_bits(tmp_path: Path, dtype: torch.dtype):
    tensor = torch.tensor([[0, 1, 5], [7, 0, 1]]).to(dtype)
    packed = pack({"a": {"t": tensor, "scalar": tensor[0, 1], "none": torch.empty(0, 4, dtype=dtype)}}, private=False)
    write_tensors(tmp_path / "a.safetensors", packed.files["a.safetensors"])
    back, _ = read_tensors(tmp_path / "a.safetensors")
    assert torch.equal(back["t"], tensor)
    assert back["t"].dtype == dtype
    assert back["scalar"].shape == ()
    assert back["none"].shape == (0, 4)


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path: Path):
    weight = torch.arange(6.0).reshape(2, 3)
    write_frozen(tmp_path / "frozen.safetensors", {"embed": {"weight": weight}, "head": {"weight": weight}})
    tensors, _ = read_tensors(tmp_path / "frozen.safetensors")
    assert len(tensors) == 1
    state = read_frozen(tmp_path / "frozen.safetensors")
    assert state["embed"]["weight"] is state["head"]["weight"]
    assert torch.equal(state["head"]["weight"], weight)


def test_overlapping_and_transposed_views_are_saved_each_as_it_is(tmp_path: Path):
    base = torch.arange(12.0).reshape(3, 4)
    views = {"whole": base, "row": base[1], "turned": base.T, "column": base[:, 2]}
    write_frozen(tmp_path / "frozen.safetensors", views)
    state = read_frozen(tmp_path / "frozen.safetensors")
    assert all(torch.equal(state[name], view) for name, view in views.items())


def test_a_state_without_tensors_can_be_frozen(tmp_path: Path):
    write_frozen(tmp_path / "frozen.safetensors", {"note": "nothing", "deep": {"x": (1, 2)}})
    assert read_frozen(tmp_path / "frozen.safetensors") == {"note": "nothing", "deep": {"x": (1, 2)}}


def test_names_that_collide_stay_apart():
    state = {"a/b": {"x": torch.zeros(1)}, "a b": {"x": torch.ones(1), "y": {1: torch.ones(2), "1": torch.zeros(2)}}}
    back = there_and_back(state)
    assert back["a/b"]["x"].item() == 0
    assert back["a b"]["x"].item() == 1
    assert back["a b"]["y"][1].tolist() == [1, 1]
    assert back["a b"]["y"]["1"].tolist() == [0, 0]


def test_a_private_copy_does_not_follow_training():
    parameter = torch.ones(4)
    shared, private = pack({"a": parameter}, private=False), pack({"a": parameter}, private=True)
    parameter.fill_(2.0)
    (live,), (copied,) = shared.files["a.safetensors"].values(), private.files["a.safetensors"].values()
    assert live.tolist() == [2.0] * 4
    assert copied.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [1, {2, 3}]}}, "state[a][b][1] is a set"),
        ({"a": torch.nn.Linear(1, 1)}, "state[a] is a Linear"),
        ({"a": torch.eye(2).to_sparse()}, "only dense ones are saved"),
        ({"a": torch.empty(2, device="meta")}, "only dense ones are saved"),
    ],
)
def test_what_cannot_be_saved_is_named(state: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        pack(state, private=False)


def test_damaged_files_are_errors(tmp_path: Path):
    path = tmp_path / "frozen.safetensors"
    with pytest.raises(CheckpointError, match="is missing"):
        read_frozen(path)
    write_frozen(path, {"a": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="damaged"):
        read_frozen(path)
    write_tensors(path, {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match="does not hold the frozen weights"):
        read_frozen(path)


def test_non_finite_numbers_survive():
    back = there_and_back({"a": [math.inf, -math.inf, math.nan]})["a"]
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
