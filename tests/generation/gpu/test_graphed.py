"""Decoding in fixed buffers gives what decoding in growing ones gives; graphs themselves need a GPU."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.engines.forward import cache_argument
from rlkit.generation.base import Generated, SamplingParams
from rlkit.generation.gpu import graphed
from rlkit.generation.gpu.admission import Admission
from rlkit.generation.gpu.graphed import GraphedDecoder
from rlkit.generation.gpu.graphs import Graphs
from rlkit.generation.gpu.steps import FusedStep, suits_steps
from rlkit.generation.native import NativeGenerator
from tests.generation.models import CONFIGS, OWN_FORWARD, family_model, prompts

FAMILIES = ["llama", "llama-biased", "llama-long", "qwen2", "qwen3", *OWN_FORWARD]


def both(
    family: str,
    params: SamplingParams,
    copies: int = 3,
    slots: int | None = None,
    graphs: bool = False,
    **options: Any,
) -> tuple[Generated, Generated]:
    """What the plain generator and the one with fixed buffers sample with the same random numbers."""
    model = family_model(family)
    ids, mask = (part.repeat_interleave(copies, 0) for part in prompts())
    plain = NativeGenerator(model, 2).generate(ids, mask, params, torch.Generator().manual_seed(1))
    uniforms = torch.rand(
        len(ids), params.max_new_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    argument = cache_argument(model)
    assert argument is not None
    decoder = GraphedDecoder(model, argument, 2, graphs=graphs, slots=slots)
    with torch.no_grad():
        return plain, decoder.generate(ids, mask, params, uniforms, **options)


def assert_same(a: Generated, b: Generated) -> None:
    assert torch.equal(a.response_mask, b.response_mask)
    width = a.generated_ids.shape[1] - a.response_mask.shape[1]
    tails = [g.generated_ids[:, width:] * g.response_mask for g in (a, b)]
    assert torch.equal(*tails)
    torch.testing.assert_close(a.rollout_logprobs, b.rollout_logprobs, rtol=1e-4, atol=1e-5)
    assert list(a.finish_reasons) == list(b.finish_reasons)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}], ids=str
)
def test_it_samples_what_the_plain_path_samples(family: str, options: dict[str, Any]) -> None:
    assert_same(*both(family, SamplingParams(max_new_tokens=24, stop_token_ids=(2, 7, 11), **options)))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prompts_without_padding_are_not_looked_at_for_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = family_model(family), SamplingParams(10, stop_token_ids=(2, 7))
    ids = torch.randint(3, 48, (4, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    numbers = torch.rand(4, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = NativeGenerator(model, 2).generate(ids, mask, params, torch.Generator().manual_seed(1))
    masks: list[Any] = []
    forward = type(model).forward

    @functools.wraps(forward)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        masks.append(kwargs["attention_mask"])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", watched)
    decoder = GraphedDecoder(model, cache_argument(model) or "", 2, graphs=False)
    with torch.no_grad():
        fixed = decoder.generate(ids, mask, params, numbers)
    assert masks[0] is None
    assert_same(plain, fixed)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("every", [1, 4])
def test_rows_that_finish_are_moved_out_of_the_batch(
    every: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host looks while the device works on the next token, so that it sees what was one token ago."""
    monkeypatch.setattr(Graphs, "run", lambda self, name, compute, *_, **__: compute())
    monkeypatch.setattr(graphed, "LOOK_EVERY", every)
    monkeypatch.setattr(graphed, "ROW_STEP", 2)
    monkeypatch.setattr(graphed, "WIDTH_STEP", 8)
    sizes: list[int] = []
    forward = GraphedDecoder._forward

    def watched(self: GraphedDecoder, buffers: Any, rows: Any, width: int, params: SamplingParams) -> None:
        sizes.append(len(rows))
        forward(self, buffers, rows, width, params)

    monkeypatch.setattr(GraphedDecoder, "_forward", watched)
    stops = tuple(range(2, 14))
    plain, fixed = both("llama", SamplingParams(max_new_tokens=30, stop_token_ids=stops), copies=6, graphs=overlaps)
    assert_same(plain, fixed)
    assert len(set(sizes)) > 2, sizes
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) < 29  # nobody runs any more


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "mistral-window"])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_rows_that_wait_take_the_slots_of_finished_ones(
    family: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than slots: the same tokens, each row told of once, no more at once than there are slots."""
    monkeypatch.setattr(graphed, "LOOK_EVERY", 3)
    monkeypatch.setattr(graphed, "WIDTH_STEP", 8)
    monkeypatch.setattr(graphed, "ROW_STEP", 2)
    seen: list[tuple[int, int]] = []
    forward = GraphedDecoder._forward

    def watched(self: GraphedDecoder, buffers: Any, rows: Any, width: int, params: SamplingParams) -> None:
        assert int(rows.place.amax()) < width
        seen.append((len(rows), int(rows.running.sum())))
        forward(self, buffers, rows, width, params)

    monkeypatch.setattr(GraphedDecoder, "_forward", watched)
    told: list[int] = []
    params = SamplingParams(max_new_tokens=20, stop_token_ids=(2, 7, 11, 13, 17))
    plain, fixed = both(family, params, copies=4, slots=slots, on_finished=lambda rows, _: told.extend(rows))
    assert_same(plain, fixed)
    assert sorted(told) == list(range(len(fixed.generated_ids)))
    assert max(running for _, running in seen) == max(size for size, _ in seen) == slots


def test_running_rows_decode_on_while_new_ones_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with graphs, which are not captured here; rows that begin are let in some tokens later."""
    begun: list[int] = []
    steps: list[int] = []
    admit, forward = Admission._begin, GraphedDecoder._forward

    def admitted(self: Admission, *args: Any) -> None:
        begun.append(len(steps))
        admit(self, *args)

    def stepped(self: GraphedDecoder, *args: Any) -> None:
        steps.append(1)
        forward(self, *args)

    monkeypatch.setattr(Graphs, "run", lambda self, name, compute, *_, **__: compute())
    monkeypatch.setattr(Admission, "_begin", admitted)
    monkeypatch.setattr(GraphedDecoder, "_forward", stepped)
    for name, value in {"LOOK_EVERY": 4, "LEAD": 3, "ROW_STEP": 2, "WIDTH_STEP": 2}.items():
        monkeypatch.setattr(graphed, name, value)
    for family in ("llama", "gemma2"):
        params = SamplingParams(12, stop_token_ids=(2, 7, 11, 13, 17))
        begun.clear()
        steps.clear()
        assert_same(*both(family, params, copies=4, slots=4, graphs=True))
        assert begun[0] == 0
        assert len(begun) > 2
        assert all(after - before >= 3 for before, after in itertools.pairwise(begun))


def test_rows_that_move_keep_when_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "ROW_STEP", 1)
    model = family_model("llama")
    decoder = GraphedDecoder(model, cache_argument(model) or "", 2, graphs=False)
    rows = decoder._buffers_for(5, 8, 4).rows
    rows.row.copy_(torch.arange(5))
    running = torch.tensor([False, True, False, True, True])
    begun = decoder._shrink(rows, running, torch.tensor([5, 1, 7, 2, 3]), 3, 8)
    assert begun.tolist() == [2, 1, 3]
    assert rows.row[:3].tolist() == [3, 1, 4]


def test_a_row_samples_the_same_in_any_number_of_slots() -> None:
    model = family_model("llama")
    ids, mask = (part.repeat_interleave(5, 0) for part in prompts())
    numbers = torch.rand(len(ids), 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    params = SamplingParams(12, stop_token_ids=(3, 5, 9))
    with torch.no_grad():
        made = [
            GraphedDecoder(model, cache_argument(model) or "", 2, graphs=False, slots=slots).generate(
                ids, mask, params, numbers
            )
            for slots in (None, 2, 7)
        ]
    for other in made[1:]:
        assert_same(made[0], other)


def test_every_row_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "LOOK_EVERY", 3)
    told: dict[int, Tensor] = {}

    def listen(rows: list[int], finished: Generated) -> None:
        for place, row in enumerate(rows):
            assert row not in told
            told[row] = finished.rollout_logprobs[place]

    _, fixed = both("qwen2", SamplingParams(20, stop_token_ids=(2, 3, 4, 5)), on_finished=listen)
    assert sorted(told) == list(range(len(fixed.generated_ids)))
    for row, logprobs in told.items():
        wanted = fixed.rollout_logprobs[row]
        torch.testing.assert_close(logprobs[: int(fixed.response_mask[row].sum())], wanted[fixed.response_mask[row]])


def test_a_second_call_with_other_prompts_leaves_nothing_behind() -> None:
    model = family_model("llama")
    argument = cache_argument(model)
    assert argument is not None
    decoder = GraphedDecoder(model, argument, 2, graphs=False)
    params = SamplingParams(10, stop_token_ids=(2,))
    ids, mask = prompts()
    numbers = torch.rand(len(ids), 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        first = decoder.generate(ids, mask, params, numbers)
        decoder.generate(ids.flip(0), mask.flip(0), SamplingParams(6, stop_token_ids=(3,)), numbers[:, :6])
        again = decoder.generate(ids, mask, params, numbers)
    assert_same(first, again)
    assert torch.equal(first.rollout_logprobs, again.rollout_logprobs)


def test_new_weights_are_seen_and_moved_ones_drop_the_buffers() -> None:
    model = family_model("llama")
    argument = cache_argument(model)
    assert argument is not None
    decoder = GraphedDecoder(model, argument, 2, graphs=False)
    ids, mask = prompts()
    params = SamplingParams(8, temperature=0.0)
    numbers = torch.zeros(len(ids), 8, dtype=torch.float64)
    with torch.no_grad():
        before = decoder.generate(ids, mask, params, numbers)
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        after = decoder.generate(ids, mask, params, numbers)
        plain = NativeGenerator(model, 2).generate(ids, mask, params, torch.Generator())
        assert_same(plain, after)
        assert not torch.equal(before.generated_ids, after.generated_ids)
        kept = decoder._buffers
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        decoder.generate(ids, mask, params, numbers)
    assert decoder._buffers is not kept


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_replay_what_the_steps_compute(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "LOOK_EVERY", 4)
    monkeypatch.setattr(graphed, "WIDTH_STEP", 16)
    # Batches of other sizes add up in another order. In float64 their products differ too little to draw other tokens.
    model = family_model(family).double().cuda()
    argument = cache_argument(model)
    assert argument is not None
    ids, mask = (part.repeat_interleave(6, 0).cuda() for part in prompts())
    params = SamplingParams(max_new_tokens=40, stop_token_ids=(2, 7, 11))
    numbers = torch.rand(len(ids), 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cuda()
    with torch.no_grad():
        plain = GraphedDecoder(model, argument, 2, graphs=False).generate(ids, mask, params, numbers)
        for slots in (None, 8):
            decoder = GraphedDecoder(model, argument, 2, slots=slots)
            for _ in range(3):
                assert_same(plain, decoder.generate(ids, mask, params, numbers))
            assert decoder._graphs.captured
            assert bool(decoder._admission._graphs.captured) == isinstance(decoder.step, FusedStep)


def test_a_step_that_cannot_be_captured_goes_on_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Graphs, "_capture", capture)
    model = family_model("gemma2")
    argument = cache_argument(model)
    assert argument is not None
    ids, mask = prompts()
    numbers = torch.rand(len(ids), 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    decoder = GraphedDecoder(model, argument, 2, graphs=True)
    with torch.no_grad():
        wanted = GraphedDecoder(model, argument, 2, graphs=False).generate(ids, mask, SamplingParams(8), numbers)
        with pytest.warns(RuntimeWarning, match="cannot be captured as a CUDA graph .* longer"):
            assert_same(wanted, decoder.generate(ids, mask, SamplingParams(8), numbers))
        assert_same(wanted, decoder.generate(ids, mask, SamplingParams(8), numbers))


def test_every_family_is_one_of_the_models() -> None:
    assert set(FAMILIES) <= set(CONFIGS)


def test_memory_that_runs_out_in_a_capture_is_no_reason_to_go_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*_: Any) -> Any:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("capture was invalidated")

    monkeypatch.setattr(Graphs, "_capture", capture)
    model = family_model("gemma")
    ids, mask = prompts()
    decoder = GraphedDecoder(model, cache_argument(model) or "", 2, graphs=True)
    numbers = torch.rand(len(ids), 8, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(RuntimeError, match="invalidated"):
        decoder.generate(ids, mask, SamplingParams(8), numbers)
    assert decoder._graphs.active


def test_rotations_that_depend_on_the_batch_are_left_to_the_model() -> None:
    model = family_model("phi3")
    assert suits_steps(model)
    model.config = copy.deepcopy(model.config)  # the tests' models share it
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "longrope"}
    assert not suits_steps(model)
    assert not suits_steps(family_model("gpt2"))
