"""Parts under a limit of tokens, and what happens when memory runs out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.engines import budget as module
from rlkit.engines.budget import Load, TokenBudget, is_out_of_memory
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
    assert (
        cut(TokenBudget(tokens=24), weight) == [[0, 2], [1, 4], [3, 5]] or len(cut(TokenBudget(tokens=24), weight)) == 4
    )
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
        lengths = [prompts[unit] + rows[unit][1] for unit in part]
        shared = sum(rows[unit][1] for unit in part) + sum({rows[unit][2]: prompts[unit] for unit in part}.values())
        assert len(part) == 1 or (shared if packed else max(lengths) * len(part)) <= tokens
        assert units is None or len(part) <= units


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
