"""The layout of a batch without padding, by hand."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.engines.packing import distinct_prompts, pack


def test_groups_read_their_prompt_once() -> None:
    """Prompts [7 8] and [9], two responses each: of 3, 1, 2 and 2 tokens, whose last is never read."""
    ids = torch.tensor([[7, 8, 1, 2, 3], [7, 8, 4, 0, 0], [0, 9, 5, 6, 0], [0, 9, 1, 1, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 0]]).bool()
    first, row_of = distinct_prompts(ids[:, :2], mask[:, :2])
    layout = pack(ids, mask, 2)
    order = [int(row) for row in row_of.unique()]
    assert [ids[row, :2].tolist() for row in first.tolist()] == [[0, 9], [7, 8]]
    assert order == [0, 1]
    # Segments: the prompts [9] and [7 8], then the responses that are read: [1 2] of row 0, [5] and [1] of rows 2, 3.
    assert layout.ids.tolist() == [9, 7, 8, 1, 2, 5, 1]
    assert layout.positions.tolist() == [0, 0, 1, 2, 3, 1, 1]
    assert layout.query_starts.tolist() == [0, 1, 3, 5, 6, 7]
    assert layout.key_starts.tolist() == [0, 1, 3, 7, 9, 11]
    assert layout.keys is not None
    assert layout.keys.tolist() == [0, 1, 2, 1, 2, 3, 4, 0, 5, 0, 6]
    assert (layout.longest_query, layout.longest_key) == (2, 4)
    # Tokens 1 2 3 | 4 | 5 6 | 1 1 are predicted from 8 1 2 | 8 | 9 5 | 9 1.
    assert layout.predicts.tolist() == [2, 3, 4, 2, 0, 5, 0, 6]


def test_sequences_stay_whole_where_no_prompt_repeats() -> None:
    ids = torch.tensor([[7, 8, 1, 2], [0, 9, 5, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]]).bool()
    layout = pack(ids, mask, 2)
    assert layout.ids.tolist() == [7, 8, 1, 9]
    assert layout.positions.tolist() == [0, 1, 2, 0]
    assert layout.query_starts.tolist() == layout.key_starts.tolist() == [0, 3, 4]
    assert layout.keys is None
    assert layout.predicts.tolist() == [1, 2, 3]


@settings(max_examples=60)
@given(
    prompts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    group=st.integers(1, 4),
    data=st.data(),
)
def test_every_token_that_predicts_stands_before_the_one_it_predicts(
    prompts: list[int], group: int, data: st.DataObject
) -> None:
    """Ids count up along each sequence, so the token before id x is x - 1."""
    rows = [(length, index) for index, length in enumerate(prompts) for _ in range(group)]
    answers = [data.draw(st.integers(0, 6)) for _ in rows]
    ids, mask = torch.zeros(len(rows), 11, dtype=torch.long), torch.zeros(len(rows), 11, dtype=torch.bool)
    for row, ((length, index), answer) in enumerate(zip(rows, answers, strict=True)):
        ids[row, 5 - length : 5 + answer] = 100 * index + torch.arange(length + answer)
        mask[row, 5 - length : 5 + answer] = True
    layout = pack(ids, mask, 5)
    wanted = ids[:, 5:][mask[:, 5:]] - 1
    assert torch.equal(layout.ids[layout.predicts], wanted)
    assert torch.equal(layout.positions[layout.predicts], wanted % 100)
    if layout.keys is not None:
        assert int(layout.key_starts[-1]) == len(layout.keys)
    assert int(layout.query_starts[-1]) == len(layout.ids) == len(layout.positions)
