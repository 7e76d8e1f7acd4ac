"""Rows that begin: how many at once, and under which names a graph of it is kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from rlkit.engines.forward import cache_argument
from rlkit.generation.base import SamplingParams
from rlkit.generation.gpu import graphed
from rlkit.generation.gpu.admission import Admission
from rlkit.generation.gpu.graphed import GraphedDecoder
from rlkit.generation.gpu.graphs import Graphs
from tests.generation.models import family_model


@pytest.mark.parametrize(
    ("free", "waiting", "slots", "entering"),
    [
        (512, 512, 512, 512),  # all of a batch
        (512, 2048, 512, 512),  # as many as there are slots
        (31, 100, 512, 0),  # less than a group
        (32, 100, 512, 32),
        (75, 100, 512, 64),  # whole groups
        (75, 40, 512, 40),  # all that wait
        (31, 10, 512, 10),
        (31, 0, 512, 0),
        (3, 9, 8, 3),
        (0, 9, 8, 0),
    ],
)
def test_rows_begin_in_whole_groups_or_all_that_wait(free: int, waiting: int, slots: int, entering: int) -> None:
    assert graphed._entering(free, waiting, slots) == entering


def run(monkeypatch: pytest.MonkeyPatch, calls: int, copies: int = 8) -> list[tuple[Hashable, bool]]:
    """Names that admissions of a batch of equal lengths have run under, and whether they may wait for a second time."""
    names: list[tuple[Hashable, bool]] = []

    def watched(
        self: Graphs, name: Hashable, compute: Callable[[], None], changing: Any = (), at_first: bool = True
    ) -> None:
        if not at_first:
            names.append((name, at_first))
        compute()

    monkeypatch.setattr(Graphs, "run", watched)
    monkeypatch.setattr(graphed, "REFILL", 2)
    monkeypatch.setattr(graphed, "ROW_STEP", 4)
    model = family_model("llama")
    ids = torch.randint(3, 48, (3, 5), generator=torch.Generator().manual_seed(0)).repeat_interleave(copies, 0)
    decoder = GraphedDecoder(model, cache_argument(model) or "", 2, slots=8)
    numbers = torch.rand(len(ids), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        for call in range(calls):
            mask = torch.ones_like(ids[:, call:], dtype=torch.bool)
            decoder.generate(ids[:, call:], mask, SamplingParams(4), numbers)
    return names


def test_admissions_of_as_many_rows_and_prompts_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(monkeypatch, calls=1)
    assert len(names) == 3  # 24 rows in 8 slots
    assert len(set(names)) == 1
    monkeypatch.undo()
    assert len(set(run(monkeypatch, calls=1, copies=6))) > 1  # a group that has rows of two prompts


def test_prompts_of_another_width_drop_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[tuple[int, ...]] = []
    start = Admission.start

    def started(self: Admission, *args: Any) -> None:
        before = self._ids.data_ptr()
        start(self, *args)
        cleared.append((self._ids.shape[1], int(self._ids.data_ptr() == before)))

    monkeypatch.setattr(Admission, "start", started)
    run(monkeypatch, calls=2)
    assert [width for width, _ in cleared] == [5, 4]
    assert not any(same for _, same in cleared)


def test_long_prompts_are_not_kept_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.generation.gpu.admission._CAPTURED", 4)
    assert run(monkeypatch, calls=1) == []
