"""Parts under a limit of tokens, and what happens when memory runs out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.engines import budget as module
from rlkit.engines.budget import Load, TokenBudget, is_out_of_memory
from rlkit.engines.packing import pack
from rlkit.errors import ModelError


def load(prompts: list[int], responses: list[int], groups: list[int] | None = None) -> Load:
    columns = (prompts, responses, list(range(len(prompts))) if groups is None else groups)
    return Load(*(torch.tensor(column, dtype=torch.long) for column in columns))


def cut(budget: TokenBudget, weight: Load, packed: bool = True) -> list[list[int]]:
    return [part.tolist() for part in budget.parts(weight, packed)]


def test_without_a_limit_parts_are_consecutive() -> None:
    weight = load([5] * 5, [1, 9, 2, 8, 3])
    assert cut(TokenBudget(), weight) == [[0, 1, 2, 3, 4]]
    assert cut(TokenBudget(units=2), weight) == [[0, 1], [2, 3], [4]]


def test_a_prompt_counts_once_in_a_packed_part() -> None:
    """Two groups of three: 10 + 3 * 5 = 25 tokens each; padded, three rows take 3 * 15 = 45."""
    weight = load([10] * 6, [5] * 6, [0, 1, 0, 1, 0, 1])
    assert cut(TokenBudget(tokens=25), weight) == [[0, 2, 4], [1, 3, 5]]
    assert cut(TokenBudget(tokens=24), weight) == [[0, 2], [4], [1, 3], [5]]
    assert cut(TokenBudget(tokens=45), weight, packed=False) == [[0, 1, 2], [3, 4, 5]]
    assert cut(TokenBudget(tokens=44), weight, packed=False) == [[0, 1], [2, 3], [4, 5]]


def test_padded_parts_hold_rows_of_like_length() -> None:
    weight = load([1] * 6, [99, 9, 99, 9, 99, 9])
    assert cut(TokenBudget(tokens=300), weight, packed=False) == [[1, 3, 5], [0, 2, 4]]


@given(
    rows=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=20),
    tokens=st.integers(1, 200),
    units=st.none() | st.integers(1, 5),
    packed=st.booleans(),
)
def test_every_unit_is_in_one_part_and_none_is_over_the_cap(
    rows: list[tuple[int, int, int]], tokens: int, units: int | None, packed: bool
) -> None:
    prompts = [5 + 3 * group for _, _, group in rows]  # one length a group
    weight = load(prompts, [response for _, response, _ in rows], [group for _, _, group in rows])
    parts = cut(TokenBudget(units, tokens), weight, packed)
    assert sorted(unit for part in parts for unit in part) == list(range(len(rows)))
    for part in parts:
        width = max(prompts[unit] for unit in part) + max(rows[unit][1] for unit in part)
        if packed:  # what really goes through the model, at most: a row's last token may be left out
            ids, mask = laid_out([(rows[unit][2], prompts[unit], rows[unit][1]) for unit in part])
            computed = len(pack(ids, mask, max(prompts[unit] for unit in part)).ids)
        else:
            computed = width * len(part)
        assert len(part) == 1 or computed <= tokens
        assert units is None or len(part) <= units


def laid_out(rows: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of sequences of (group, prompt tokens, response tokens); a group has one prompt."""
    before, after = max(prompt for _, prompt, _ in rows), max(max(response for _, _, response in rows), 1)
    places = torch.arange(before + after) - before
    mask = torch.stack([(places >= -prompt) & (places < response) for _, prompt, response in rows])
    return torch.tensor([[5 + group] * (before + after) for group, _, _ in rows]), mask


def test_a_prompt_that_packing_does_not_share_counts_with_every_row() -> None:
    """Two prompts in three rows are laid out whole, 3 * 110 tokens; in four rows shared, 2 * 100 + 4 * 10."""
    three, four = load([100] * 3, [10] * 3, [0, 0, 1]), load([100] * 4, [10] * 4, [0, 0, 0, 1])
    assert cut(TokenBudget(tokens=329), three) == [[0, 1], [2]]
    assert cut(TokenBudget(tokens=330), three) == [[0, 1, 2]]
    assert cut(TokenBudget(tokens=240), four) == [[0, 1, 2, 3]]
    assert (three.tokens(torch.arange(3), packed=True), four.tokens(torch.arange(4), packed=True)) == (330, 240)


def test_padding_reaches_the_longest_prompt_and_the_longest_response() -> None:
    """Rows of 90 + 10 and 10 + 90 tokens, padded, are two of 180. A pair is two rows of its longer side."""
    rows = load([90, 10], [10, 90])
    assert cut(TokenBudget(tokens=359), rows, packed=False) == [[0], [1]]
    assert cut(TokenBudget(tokens=360), rows, packed=False) == [[0, 1]]
    counts = torch.tensor([100, 1])
    pairs = Load(torch.tensor([10, 10]), torch.tensor([101, 101]), torch.arange(2), counts[[0, 0]], rows=2)
    assert pairs.tokens(torch.arange(2), packed=False) == 4 * 110
    assert cut(TokenBudget(tokens=439), pairs, packed=False) == [[0], [1]]


def test_memory_that_runs_out_halves_the_limit_until_one_is_left() -> None:
    budget, weight = TokenBudget(), load([10] * 4, [10] * 4)
    budget.shrink(80, alone=False)
    assert budget.limit == 40
    assert cut(budget, weight) == [[0, 1], [2, 3]]
    budget.shrink(40, alone=False)
    assert cut(budget, weight) == [[0], [1], [2], [3]]
    with pytest.raises(ModelError, match="single sequence of 20 tokens: set activations='recompute'"):
        budget.shrink(20, alone=True)


def test_parts_are_sized_by_free_memory_up_to_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, cpu = TokenBudget(tokens=100_000, dynamic=True), torch.device("cpu")
    assert budget.limit == 2048
    with budget.measured(100, cpu):
        weights = torch.nn.Parameter(torch.ones(1000))
        (weights * 2).square().sum()  # keeps one intermediate result of 4000 bytes, and no weights
    assert budget.bytes_per_token == pytest.approx(40.0, rel=0.01)
    monkeypatch.setattr(module, "free_bytes", lambda device: 800_000)
    budget.look_at_memory(cpu)
    assert budget.limit == 10_000
    monkeypatch.setattr(module, "free_bytes", lambda device: 10**12)
    budget.look_at_memory(cpu)
    assert budget.limit == 100_000


def test_which_errors_mean_that_memory_ran_out() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
