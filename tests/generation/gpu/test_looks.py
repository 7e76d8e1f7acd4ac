"""The host looks while the device works on; however late it does, tokens are the same and rows are told of once."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlkit.engines.forward import cache_argument
from rlkit.generation.base import Generated, SamplingParams
from rlkit.generation.gpu import graphed
from rlkit.generation.gpu.graphed import GraphedDecoder
from rlkit.generation.gpu.graphs import Graphs
from rlkit.generation.native import NativeGenerator
from tests.generation.gpu.test_graphed import assert_same
from tests.generation.models import family_model, prompts

COPIES = 3


def batch(family: str, params: SamplingParams) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, mask = (part.repeat_interleave(COPIES, 0) for part in prompts())
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(len(ids), params.max_new_tokens, generator=generator, dtype=torch.float64)
    return family_model(family), ids, mask, uniforms


@cache
def plain(family: str, params: SamplingParams) -> Generated:
    model, ids, mask, _ = batch(family, params)
    return NativeGenerator(model, 2).generate(ids, mask, params, torch.Generator().manual_seed(1))


@example("llama", 2, 1, 1, 1, 0)
@example("llama", 11, 5, 2, 2, 8)
@example("gemma2", 1, 1, 8, 8, 13)
@given(
    st.sampled_from(["llama", "gemma2"]),
    st.sampled_from([1, 2, 3, 11]),
    st.sampled_from([1, 2, 5, 100]),
    st.integers(1, 8),
    st.integers(0, 9),
    st.sampled_from([0, 8, 30]),
)
@settings(max_examples=8)
def test_late_looks_change_nothing(family: str, tokens: int, slots: int, every: int, lead: int, stops: int) -> None:
    """As on a GPU, without graphs; `stops` of the 48 tokens end a row, so that rows end now and then, or all early."""
    params = SamplingParams(tokens, stop_token_ids=tuple(range(2, 2 + stops)))
    model, ids, mask, uniforms = batch(family, params)
    told: dict[int, tuple[list[int], list[float], str]] = {}

    def listen(rows: list[int], made: Generated) -> None:
        for at, row in enumerate(rows):
            assert row not in told
            told[row] = response(made, at)

    def response(made: Generated, at: int) -> tuple[list[int], list[float], str]:
        own = made.response_mask[at]
        ids_of = made.generated_ids[at, ids.shape[1] :]
        return ids_of[own].tolist(), made.rollout_logprobs[at][own].tolist(), list(made.finish_reasons)[at]

    asked, forward = GraphedDecoder._asked, GraphedDecoder._forward

    def as_it_was(self: GraphedDecoder, rows: Any) -> Any:
        before = rows.running.clone()
        running, arrived = asked(self, rows)

        def then() -> None:
            arrived()
            assert torch.equal(running, before)

        return running, then

    def in_reach(self: GraphedDecoder, buffers: Any, rows: Any, width: int, params: SamplingParams) -> None:
        assert int(rows.place.amax()) < width <= buffers.capacity
        forward(self, buffers, rows, width, params)

    small = {"LOOK_EVERY": every, "LEAD": lead, "ROW_STEP": 1, "WIDTH_STEP": 2, "REFILL": 4}
    with (
        patch.object(Graphs, "run", lambda self, name, compute, *_, **__: compute()),
        patch.object(GraphedDecoder, "_asked", as_it_was),
        patch.object(GraphedDecoder, "_forward", in_reach),
        patch.multiple(graphed, **small),
        torch.no_grad(),
    ):
        decoder = GraphedDecoder(model, cache_argument(model) or "", 2, graphs=True, slots=slots)
        made = decoder.generate(ids, mask, params, uniforms, listen)
    assert_same(plain(family, params), made)
    assert told == {row: response(made, row) for row in range(len(ids))}
    decoder.release()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a decoder does, in order."""
    seen: list[str] = []
    asked, forward = GraphedDecoder._asked, GraphedDecoder._forward

    def watched(self: GraphedDecoder, rows: Any) -> Any:
        running, _ = asked(self, rows)
        seen.append("asked")
        return running, lambda: seen.append("waited")

    def stepped(self: GraphedDecoder, *arguments: Any) -> None:
        seen.append("token")
        forward(self, *arguments)

    monkeypatch.setattr(Graphs, "run", lambda self, name, compute, *_, **__: compute())
    monkeypatch.setattr(GraphedDecoder, "_asked", watched)
    monkeypatch.setattr(GraphedDecoder, "_forward", stepped)
    monkeypatch.setattr(graphed, "LOOK_EVERY", 4)
    return seen


def decode(tokens: int, slots: int | None = None) -> int:
    """Rows that never stop early; their number."""
    params = SamplingParams(tokens)
    model, ids, mask, uniforms = batch("llama", params)
    with torch.no_grad():
        decoder = GraphedDecoder(model, cache_argument(model) or "", 2, graphs=True, slots=slots)
        decoder.generate(ids, mask, params, uniforms)
    return len(ids)


@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_the_device_has_a_token_to_work_on_before_the_host_waits(tokens: int, events: list[str]) -> None:
    """Not at the end, where no row goes on."""
    decode(tokens)
    look, late, token = ["asked", "waited"], ["asked", "token", "waited"], ["token"]
    wanted = {
        1: [*look, *look],
        2: [*look, *look, *token, *look],
        12: [*look, *look, *token, *late, *token * 2, *late, *token * 3, *late, *token * 2, *look],
    }
    assert events == wanted[tokens]


def test_the_host_looks_as_rarely_at_rows_that_begin_late(events: list[str]) -> None:
    """Every four tokens of the eleven that follow a row's first, when it has begun, after one, and when it ends."""
    rows = decode(12, slots=1)
    assert events.count("token") <= 12 * rows  # one, at most, is taken for a row that the late look shows running
    assert events.count("asked") <= 6 * rows
