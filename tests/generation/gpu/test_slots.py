"""The rows that decode together: what each may read, and from where."""

from __future__ import annotations

import torch

from rlkit.generation.gpu.slots import Buffers, take_in

INFINITE = float("-inf")


def buffers(slots: int = 4, rows: int = 6) -> Buffers:
    return Buffers((1, 2, slots, 1, 5, 2), rows, steps=2, dtype=torch.float32, device=torch.device("cpu"))


def test_a_row_reads_from_its_first_token_to_its_last() -> None:
    rows = buffers(slots=3).rows
    rows.clear(2, spare=6)
    rows.begin.copy_(torch.tensor([0, 1, 2]))
    rows.place.copy_(torch.tensor([3, 2, 2]))
    assert rows.position.tolist() == [3, 1, 0]
    assert rows.time.tolist() == [2, 1, 1]
    assert rows.bias(5)[:, 0, 0].tolist() == [
        [0, 0, 0, 0, INFINITE],
        [INFINITE, 0, 0, INFINITE, INFINITE],
        [INFINITE, INFINITE, 0, INFINITE, INFINITE],
    ]


def test_rows_that_end_stand_after_their_prompt() -> None:
    made = buffers(slots=4)
    made.limit.fill_(2)
    rows = made.rows
    rows.clear(2, made.spare)
    rows.row.copy_(torch.tensor([3, 1, 0, made.spare]))
    rows.running.copy_(torch.tensor([True, True, True, False]))
    rows.prompt_end.copy_(torch.tensor([2, 2, 3, 2]))  # the third has its first token yet to come
    logprobs = torch.tensor([-0.1, -0.2, -0.3, -0.4])
    take_in(made, rows, torch.tensor([7, 8, 9, 5]), logprobs, torch.tensor([True, False, True, True]))
    assert rows.place.tolist() == [2, 2, 3, 2]
    assert rows.tokens.tolist() == [7, 8, 9, 5]
    assert rows.running.tolist() == [False, False, True, False]
    assert made.ids[:-1].tolist() == [[9, 0], [0, 8], [0, 0], [0, 7], [0, 0], [0, 0]]
    assert made.mask[:-1].sum(1).tolist() == [1, 1, 0, 1, 0, 0]
    torch.testing.assert_close(made.logprobs[[3, 1, 0], [1, 1, 0]], logprobs[:3])


def test_running_rows_of_one_prompt_read_it_from_the_first_of_them() -> None:
    made = buffers(slots=6)
    ids = torch.tensor([[3, 4], [9, 9], [3, 4], [9, 9], [3, 4], [3, 4]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[5, 0] = False  # the same ids, of which one is padding
    made.start(ids, mask, torch.rand(6, 2, dtype=torch.float64), pad_token_id=0)
    rows = made.rows
    rows.clear(2, made.spare)
    rows.row.copy_(torch.tensor([0, 1, 2, 3, 4, 5]))
    rows.running.fill_(True)
    rows.share_prompts(made.prompt_of)
    assert rows.source.tolist() == [0, 1, 0, 1, 0, 5]
    rows.running[0] = False  # its slot may go to another row
    rows.share_prompts(made.prompt_of)
    assert rows.source.tolist() == [0, 1, 2, 1, 2, 5]
    rows.row[0], rows.running[0] = made.spare, False
    rows.first(3).share_prompts(made.prompt_of)
    assert rows.source.tolist() == [0, 1, 2, 1, 2, 5]


def test_prompts_of_chosen_rows_are_given_once() -> None:
    made = buffers(slots=6)
    ids = torch.tensor([[3, 4], [9, 9], [3, 4], [5, 6]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    made.start(ids, mask, torch.rand(4, 2, dtype=torch.float64), pad_token_id=0)
    given, row_of = made.distinct(torch.tensor([0, 2, 3]))
    assert sorted(ids[given].tolist()) == [[3, 4], [5, 6]]
    assert ids[given][row_of].tolist() == ids[[0, 2, 3]].tolist()
