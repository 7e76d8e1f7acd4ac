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
@example("gemma2", 1, 1, 8, 8, 13)
@given(
    st.sampled_from(["llama", "gemma2"]),
    st.sampled_from([1, 2, 3, 11]),
    st.sampled_from([1, 2, 5, 100]),
    st.integers(1, 8),
    st.integers(0, 9),
    st.sampled_from([0, 8, 30]),
)
@settings(max_examples=20)
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

    forward = GraphedDecoder._forward

    def in_reach(self: GraphedDecoder, buffers: Any, rows: Any, width: int, params: SamplingParams) -> None:
        assert int(rows.place.amax()) < width <= buffers.capacity
        forward(self, buffers, rows, width, params)

    small = {"LOOK_EVERY": every, "LEAD": lead, "ROW_STEP": 1, "WIDTH_STEP": 2, "REFILL": 4}
    with (
        patch.object(Graphs, "run", lambda self, name, compute, changing: compute()),
        patch.object(GraphedDecoder, "_forward", in_reach),
        patch.multiple(graphed, **small),
        torch.no_grad(),
    ):
        decoder = GraphedDecoder(model, cache_argument(model) or "", 2, graphs=True, slots=slots)
        made = decoder.generate(ids, mask, params, uniforms, listen)
    assert_same(plain(family, params), made)
    assert told == {row: response(made, row) for row in range(len(ids))}
    decoder.release()


@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_the_device_has_a_token_to_work_on_before_the_host_waits(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked, a token, waited: but not where no row can go on, and every token is taken as if nobody had looked."""
    events: list[str] = []
    asked, forward = GraphedDecoder._asked, GraphedDecoder._forward

    def watched(self: GraphedDecoder, rows: Any) -> Any:
        running, _ = asked(self, rows)
        events.append("asked")
        return running, lambda: events.append("waited")

    def stepped(self: GraphedDecoder, *arguments: Any) -> None:
        events.append("token")
        forward(self, *arguments)

    monkeypatch.setattr(Graphs, "run", lambda self, name, compute, changing: compute())
    monkeypatch.setattr(GraphedDecoder, "_asked", watched)
    monkeypatch.setattr(GraphedDecoder, "_forward", stepped)
    monkeypatch.setattr(graphed, "LOOK_EVERY", 4)
    params = SamplingParams(tokens)
    model, ids, mask, uniforms = batch("llama", params)
    decoder = GraphedDecoder(model, cache_argument(model) or "", 2, graphs=True)
    with torch.no_grad():
        decoder.generate(ids, mask, params, uniforms)
    look, late, token = ["asked", "waited"], ["asked", "token", "waited"], ["token"]
    wanted = {
        1: [*look, *look],
        2: [*look, *look, *token, *look],
        12: [*look, *look, *token, *late, *token * 2, *late, *token * 3, *late, *token * 2, *look],
    }
    assert events == wanted[tokens]
    assert events.count("token") == tokens - 1
