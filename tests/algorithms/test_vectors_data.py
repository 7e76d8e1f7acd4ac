"""Every case of the reference vectors of masks, padding and balanced parts."""

import itertools

import pytest
import torch
from torch import Tensor

from rlkit.balance import balanced_partitions
from rlkit.collate import DataCollector, mask_from_lengths, resize_column
from tests.algorithms.vectors import Case, cases


def _resized(ids: Tensor, letter: str, width: int) -> Tensor:
    """Prompts ("P") change at their left end, responses ("T") at their right end."""
    return resize_column(ids, ("B", letter), {}, {letter: width}, fill=0)


def _length(ids: list[int], ends: list[int]) -> int:
    """Where the file's response stops: with its first end token. The library is told, it never looks at ids."""
    return next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids))


@pytest.mark.parametrize("case", cases("masks_and_padding"))
def test_masks_and_padding(case: Case) -> None:
    params, raw = case.params, case.raw
    if "eos_token" in params:
        ends = params["eos_token"] if isinstance(params["eos_token"], list) else [params["eos_token"]]
        lengths = [_length(row, ends) for row in raw["response_ids"]]
        case.check("mask", mask_from_lengths(lengths, len(raw["response_ids"][0])))
        rows = [row[:length] for row, length in zip(raw["response_ids"], lengths, strict=True)]
        case.check("mask", DataCollector(pad_token_id=ends[0]).collate_responses(rows, width=7)["response_mask"])
    elif "lists" in raw:
        made = DataCollector(params["pad"]).collate_responses(raw["lists"], width=params["max_length"])
        case.check("padded", made["response_ids"])
    elif "truncation" not in params:
        made = DataCollector(0).collate_prompts(raw["input_ids"], width=params["max_length"])
        case.check("input_ids", made["input_ids"])
        case.check("attention_mask", made["attention_mask"])
    else:
        width = params["max_length"]
        for name, column in (
            ("input_ids", torch.tensor(raw["input_ids"])),
            ("attention_mask", torch.ones(1, len(raw["input_ids"][0]), dtype=torch.int64)),
        ):
            if params["truncation"] == "left":
                case.check(name, _resized(column, "P", width))
            else:
                ends_kept = [_resized(column, "T", width // 2), _resized(column, "P", width - width // 2)]
                case.check(name, torch.cat(ends_kept, dim=1))


@pytest.mark.parametrize("case", cases("seqlen_balance"))
def test_balanced_partitions(case: Case) -> None:
    """The file's contract: every index once, no empty part, equal sizes when asked, no larger spread than its own."""
    lengths, k = case.raw["seqlens"], case.params["k"]
    parts = balanced_partitions(lengths, k, case.params["equal_size"])
    sums = [sum(lengths[index] for index in part) for part in parts]
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert len(parts) == k
    assert all(parts)
    assert max(sums) - min(sums) <= case.outputs["spread_max_minus_min"]
    assert max(sums) - min(sums) < case.outputs["greedy_spread"]
    if case.params["equal_size"]:
        assert {len(part) for part in parts} == {len(lengths) // k}
