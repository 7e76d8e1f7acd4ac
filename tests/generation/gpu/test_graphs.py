"""When a computation is captured; what a capture does needs a GPU and is in test_graphed.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlkit.generation.gpu.graphs import Graphs


class Replayed:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def replay(self) -> None:
        self.calls.append("replay")


@pytest.mark.parametrize(
    ("at_first", "wanted"),
    [
        (True, ["capture", "replay", "replay", "replay"]),
        (False, ["compute", "capture", "replay", "replay"]),
    ],
)
def test_a_name_is_captured_when_it_comes_for_the_first_or_the_second_time(
    at_first: bool, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def capture(*_: Any) -> Replayed:
        calls.append("capture")
        return Replayed(calls)

    monkeypatch.setattr(Graphs, "_capture", capture)
    graphs = Graphs(torch.device("cpu"), "a test", active=True)
    known = []
    for _ in range(3):
        known.append(graphs.has("a"))
        graphs.run("a", lambda: calls.append("compute"), at_first=at_first)
    assert calls == wanted
    assert known == [False, at_first, True]
    graphs.clear()
    calls.clear()
    assert not graphs.has("a")
    graphs.run("a", lambda: calls.append("compute"), at_first=at_first)
    assert calls == wanted[: 1 + at_first]


def test_without_graphs_everything_is_computed() -> None:
    calls: list[str] = []
    graphs = Graphs(torch.device("cpu"), "a test", active=False)
    for _ in range(3):
        graphs.run("a", lambda: calls.append("compute"), at_first=False)
    assert calls == ["compute"] * 3
    assert not graphs.has("a")
