"""The rollout batch: fields, checks, row and column operations."""

import pickle
from typing import Any

import pytest
import torch

from rlkit.batch import FIELDS, Field, RolloutBatch, field_for
from rlkit.errors import DataError
from tests.batches import PAD, TWO, same

# Fields


def test_every_known_field_is_well_formed() -> None:
    assert {"input_ids", "generated_ids", "response_mask", "rewards", "advantages", "columns"} <= FIELDS.keys()
    for name, field in FIELDS.items():
        assert field.name == name
        assert field.doc
        assert set(field.dims) <= set("BPTL")
        assert field_for(name) is field


def test_reward_terms_are_a_family_of_fields() -> None:
    field = field_for("reward/safety")
    assert field is not None
    assert (field.dims, field.dtype) == (("B",), "float32")
    assert field_for("reward/") is None
    assert field_for("reword/safety") is None


@pytest.mark.parametrize(
    ("dims", "dtype", "message"),
    [
        (("B",), "float16", "dtype 'float16'; expected one of int64, bool, float32, text, object"),
        (("T", "B"), "float32", r"expected 'B' \(rollouts\) first"),
        ((), "float32", r"expected 'B' \(rollouts\) first"),
        (("B", "T"), "text", "nothing after it for text and object"),
    ],
)
def test_ill_formed_fields_are_refused(dims: tuple[str, ...], dtype: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Field("mine", dims, dtype, "")


# Reading


def test_collated_layout_positions_and_lengths() -> None:
    assert TWO.input_ids.tolist() == [[4, 2, 5], [PAD, PAD, 1]]
    assert TWO.generated_ids.tolist() == [[4, 2, 5, 5, 6, 2, PAD, PAD], [PAD, PAD, 1, 5, 6, 7, 8, 9]]
    assert TWO.full_attention_mask.int().tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]
    assert TWO.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 5, 5], [0, 0, 0, 1, 2, 3, 4, 5]]
    assert TWO.response_lengths.tolist() == [3, 5]
    assert (TWO.batch_size, len(TWO), TWO.prompt_width, TWO.response_width) == (2, 2, 3, 5)
    assert {name: term.tolist() for name, term in TWO.reward_terms.items()} == {"length": [3.0, 5.0]}
    assert TWO.device == torch.device("cpu")


def test_columns_by_key_and_by_attribute() -> None:
    assert TWO["prompts"] == TWO.prompts == ["prompt 0", "prompt 1"]
    assert TWO.columns[1] == {"answer": 1, "notes": [1, None]}
    assert "values" in TWO
    assert "returns" not in TWO
    with pytest.raises(DataError, match="no field 'returns'; it has input_ids, attention_mask"):
        TWO["returns"]
    with pytest.raises(AttributeError, match="neither an attribute nor a field 'returns'"):
        TWO.returns  # noqa: B018
    assert "values(2, 5) float32" in repr(TWO)


def test_objects_may_be_lists_tensors_and_none() -> None:
    values: list[Any] = [[1, 2], None, "text", (3,)]
    batch = RolloutBatch({"rows": [0, 1, 2, 3], "columns": values})
    assert batch.columns == values
    assert batch.select([3, 0]).columns == [(3,), [1, 2]]


def test_widths_follow_from_any_two_of_p_t_and_l() -> None:
    batch = RolloutBatch({name: TWO[name] for name in ("input_ids", "generated_ids")})
    assert batch.response_width == 5
    with pytest.raises(DataError, match="no field with a dimension 'T'"):
        _ = RolloutBatch({"input_ids": TWO.input_ids}).response_width


def test_pickling_keeps_everything() -> None:
    assert same(pickle.loads(pickle.dumps(TWO)), TWO)


# Adding


def test_with_fields_leaves_the_old_batch_alone() -> None:
    more = TWO.with_fields({"rewards": [0.5, 1]})
    assert more.rewards.tolist() == [0.5, 1.0]
    assert more.rewards.dtype == torch.float32
    assert "rewards" not in TWO
    again = more.with_fields({"rewards": torch.zeros(2)})
    assert more.rewards.tolist() == [0.5, 1.0]
    assert again.names == more.names


def test_stored_tensors_are_detached() -> None:
    values = torch.ones(2, 5, requires_grad=True)
    assert not TWO.with_fields({"values": values * 2}).values.requires_grad


def test_fields_of_your_own() -> None:
    hidden = Field("hidden", ("B", "T", "H"), "float32", "state before each token")
    batch = TWO.with_fields({"hidden": torch.ones(2, 5, 3)}, specs=[hidden])
    assert batch.resize(5, 7).hidden.shape == (2, 7, 3)
    assert batch.with_fields({"hidden": torch.zeros(2, 5, 3)}).hidden.sum() == 0
    with pytest.raises(DataError, match=r"needs shape \(B=2, T=5, H=3\), given \(2, 5, 4\): H is 3 in 'hidden'"):
        batch.with_fields({"other": torch.ones(2, 5, 4)}, specs=[Field("other", ("B", "T", "H"), "float32", "")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"values": torch.zeros(2, 4)},
            r"'values' needs shape \(B=2, T=5\), given \(2, 4\): T is 5 in 'response_mask'",
        ),
        ({"values": torch.zeros(2)}, r"'values' needs shape \(B=2, T=5\), given \(2,\)"),
        ({"rewards": torch.zeros(3)}, r"'rewards' needs shape \(B=2\), given \(3,\): B is 2 in 'input_ids'"),
        ({"generated_ids": torch.zeros(2, 9, dtype=torch.int64)}, r"L = P \+ T = 3 \+ 5|L is 8"),
        (
            {"rewards": torch.zeros(2, dtype=torch.float64)},
            r"float32, given float64; convert it with \.to\(torch.float32",
        ),
        ({"response_mask": torch.ones(2, 5)}, "bool, given float32"),
        ({"rewards": [None, 1.0]}, r"'rewards' needs float32 numbers, given \[None, 1.0\]"),
        ({"prompts": ["one"]}, r"'prompts' needs shape \(B=2\), given \(1,\)"),
        ({"prompts": ["one", 2]}, "'prompts' holds text; entry 1 is a int"),
        ({"prompts": "ab"}, "'prompts' needs a list with one entry per rollout, given str"),
        ({"columns": {"a": 1, "b": 2}}, "'columns' needs a list with one entry per rollout, given dict"),
        ({"rewrds": [1.0, 2.0]}, r"unknown field 'rewrds'. Did you mean 'rewards'\? .*Field\('rewrds'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TWO.with_fields(fields)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(DataError, match="at least one field"):
        RolloutBatch({})


# Rows and columns


def test_rows_by_index_mask_and_slice() -> None:
    flipped = TWO.select([1, 0])
    assert flipped.prompts == ["prompt 1", "prompt 0"]
    assert flipped.rows.tolist() == [1, 0]
    assert same(flipped.select(torch.tensor([1, 0])), TWO)
    assert TWO.select([False, True]).prompts == ["prompt 1"]
    assert TWO.select(torch.tensor([True, False])).rows.tolist() == [0]
    assert TWO.select(slice(1, 9)).rows.tolist() == [1]
    assert TWO.select([0, 0, -1]).rows.tolist() == [0, 0, 1]


def test_no_rows_is_a_batch_too() -> None:
    none = TWO.select([])
    assert (none.batch_size, none.prompts, none.values.shape) == (0, [], (0, 5))
    assert none.trim().response_width == 5
    assert same(RolloutBatch.cat([none, TWO]), TWO)


@pytest.mark.parametrize("indices", [[2], [-3], [[0]], [0.5]])
def test_rows_that_are_not_there_are_refused(indices: Any) -> None:
    with pytest.raises(DataError, match=r"row indices must be one list of ints within -2\.\.1"):
        TWO.select(indices)


def test_a_row_mask_of_another_length_is_refused() -> None:
    with pytest.raises(DataError, match=r"a row mask needs shape \(2,\), given \(3,\)"):
        TWO.select([True, False, True])


def test_split_and_cat_are_inverse() -> None:
    five = TWO.select([0, 1, 1, 0, 1])
    parts = five.split(2)
    assert [len(part) for part in parts] == [2, 2, 1]
    assert same(RolloutBatch.cat(parts), five)
    with pytest.raises(DataError, match="at least one row, given 0"):
        five.split(0)


def test_cat_needs_batches_with_the_same_fields() -> None:
    with pytest.raises(DataError, match=r"batch 1 and batch 0 differ in \['rewards'\]"):
        RolloutBatch.cat([TWO, TWO.with_fields({"rewards": [0, 1]})])
    with pytest.raises(DataError, match="at least one batch"):
        RolloutBatch.cat([])


def test_trim_drops_columns_that_are_padding_in_every_row() -> None:
    first = TWO.select([0]).trim()
    assert first.generated_ids.tolist() == [[4, 2, 5, 5, 6, 2]]
    assert first.values.tolist() == [[1.0, 2.0, 3.0]]
    second = TWO.select([1]).trim()
    assert second.generated_ids.tolist() == [[1, 5, 6, 7, 8, 9]]
    assert second.trim().generated_ids is second.generated_ids
    empty = TWO.with_fields({"response_mask": torch.zeros(2, 5, dtype=torch.bool)}).trim()
    assert empty.response_width == 1


def test_cat_pads_to_the_widest() -> None:
    apart = [TWO.select([0]).trim(), TWO.select([1]).trim()]
    assert same(RolloutBatch.cat(apart, pad_token_id=PAD), TWO)


def test_tensors_move_together_and_new_ones_follow() -> None:
    moved = TWO.to("meta")
    assert moved.device.type == moved.values.device.type == "meta"
    assert moved.prompts == TWO.prompts
    assert moved.with_fields({"rewards": torch.zeros(2)}).rewards.device.type == "meta"
    assert TWO.device.type == "cpu"
