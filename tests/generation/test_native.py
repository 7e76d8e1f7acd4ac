"""What native generation returns: masks, reasons, reports, randomness, modes, refusals."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from rlkit.engines.forward import cache_argument
from rlkit.errors import GenerationError
from rlkit.generation.base import Generated, Generator, SamplingParams
from rlkit.generation.decoders import Decoder
from rlkit.generation.gpu.graphed import GraphedDecoder
from rlkit.generation.native import NativeGenerator, decoder_for
from tests.generation.models import (
    Recurrent,
    family_model,
    prompts,
    rng,
    teacher_forced,
)
from tests.tiny import tiny_model


def test_it_is_a_generator() -> None:
    assert isinstance(NativeGenerator(tiny_model()), Generator)


def test_masks_come_from_finishing_and_not_from_token_values() -> None:
    """Pad = end = 2, and 2 also stands inside a prompt: it is attended there, and the sampled one counts."""
    model = tiny_model()
    ids = torch.tensor([[2, 4, 2, 5], [9, 4, 2, 5]])
    mask = torch.tensor([[False, True, True, True], [True, True, True, True]])
    with torch.no_grad():
        model.lm_head.weight[2] += 0.4 * model.lm_head.weight[2].sign()
    out = NativeGenerator(model, pad_token_id=2).generate(
        torch.cat([ids] * 20), torch.cat([mask] * 20), SamplingParams(6, stop_token_ids=(2,)), rng(2)
    )
    responses, lengths = out.generated_ids[:, 4:], out.response_mask.sum(-1).tolist()
    assert {"stop", "length"} == set(out.finish_reasons)
    for response, kept, length, reason in zip(
        responses.tolist(), out.response_mask.tolist(), lengths, out.finish_reasons, strict=True
    ):
        assert kept == [True] * length + [False] * (6 - length)
        assert (response[length - 1] == 2) == (reason == "stop")
        assert 2 not in response[: length - 1]
        assert set(response[length:]) <= {2}
        assert length == 6 or reason == "stop"
    torch.testing.assert_close(
        out.rollout_logprobs, teacher_forced(model, torch.cat([mask] * 20), out), atol=1e-5, rtol=0
    )


def test_without_stop_tokens_every_response_has_full_length() -> None:
    out = NativeGenerator(tiny_model()).generate(*prompts(), SamplingParams(7), rng())
    assert out.response_mask.shape == (5, 7)
    assert bool(out.response_mask.all())
    assert out.finish_reasons == ["length"] * 5


def test_a_rows_tokens_depend_on_its_own_numbers_only() -> None:
    """The first row draws the same numbers alone and in a batch whose other rows finish at other times."""
    model = tiny_model()
    ids, mask = prompts(8)
    params = SamplingParams(12, stop_token_ids=(5, 6, 7, 8, 9))
    together = NativeGenerator(model).generate(ids, mask, params, rng(0))
    alone = NativeGenerator(model).generate(ids[:1], mask[:1], params, rng(0))
    length = int(alone.response_mask.sum())
    assert len(set(together.response_mask.sum(-1).tolist())) > 1
    assert together.generated_ids[0, : 6 + length].tolist() == alone.generated_ids[0].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_same_seed_gives_the_same_bits(family: str) -> None:
    model = family_model(family)
    params = SamplingParams(10, stop_token_ids=(2, 3))
    first, second = (NativeGenerator(model).generate(*prompts(), params, rng(7)) for _ in range(2))
    assert torch.equal(first.generated_ids, second.generated_ids)
    assert torch.equal(first.rollout_logprobs, second.rollout_logprobs)
    other = NativeGenerator(model).generate(*prompts(), params, rng(8))
    assert not torch.equal(first.generated_ids[:, :8], other.generated_ids[:, :8])


def test_the_generator_advances_the_same_whatever_is_sampled() -> None:
    """The state of the random numbers after a call depends on the size of the batch, not on when rows finished."""
    stopping, endless, generator = rng(5), rng(5), NativeGenerator(tiny_model())
    generator.generate(*prompts(), SamplingParams(6, stop_token_ids=tuple(range(40))), stopping)
    generator.generate(*prompts(), SamplingParams(6), endless)
    assert torch.equal(stopping.get_state(), endless.get_state())


def test_finished_rows_leave_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    heights: list[int] = []
    decoder = type(decoder_for(tiny_model(), 16))
    original = decoder.step

    def counted(self: Decoder, tokens: Tensor) -> Tensor:
        heights.append(len(tokens))
        return original(self, tokens)

    monkeypatch.setattr(decoder, "step", counted)
    out = NativeGenerator(tiny_model()).generate(
        *prompts(12), SamplingParams(10, stop_token_ids=tuple(range(2, 12))), rng(1)
    )
    lengths = out.response_mask.sum(-1)
    running = [int((lengths > t).sum()) for t in range(1, 10)]
    assert heights == [count for count in running if count]
    assert len(set(heights)) > 2


def test_every_row_is_reported_once_when_it_finishes() -> None:
    told: list[tuple[list[int], Generated]] = []
    out = NativeGenerator(tiny_model()).generate(
        *prompts(12),
        SamplingParams(9, stop_token_ids=tuple(range(2, 8))),
        rng(1),
        lambda rows, part: told.append((rows, part)),
    )
    assert sorted(row for rows, _ in told for row in rows) == list(range(12))
    assert len(told) > 2
    ends = []
    for rows, part in told:
        width = part.response_mask.shape[1]
        assert part.generated_ids.shape[1] == 6 + width
        assert torch.equal(part.response_mask, out.response_mask[rows, :width])
        assert torch.equal(part.rollout_logprobs, out.rollout_logprobs[rows, :width])
        kept = torch.cat([torch.ones(len(rows), 6, dtype=torch.bool), part.response_mask], dim=1)
        assert torch.equal(part.generated_ids[kept], out.generated_ids[rows, : 6 + width][kept])
        assert part.finish_reasons == [out.finish_reasons[row] for row in rows]
        ends.append(width)
    assert ends == sorted(ends)


def test_an_error_of_the_listener_comes_out_and_the_mode_is_restored() -> None:
    model = tiny_model().train()

    def fail(rows: list[int], part: Generated) -> None:
        raise KeyError("listener")

    with pytest.raises(KeyError, match="listener"):
        NativeGenerator(model).generate(*prompts(), SamplingParams(3), rng(), fail)
    assert all(module.training for module in model.modules())


def test_dropout_is_off_while_sampling_and_every_mode_comes_back() -> None:
    model = family_model("gpt2")
    params = SamplingParams(8)
    calm = NativeGenerator(model).generate(*prompts(), params, rng(1))
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    assert any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in model.modules())
    trained = NativeGenerator(model).generate(*prompts(), params, rng(1))
    assert torch.equal(trained.generated_ids, calm.generated_ids)
    assert torch.equal(trained.rollout_logprobs, calm.rollout_logprobs)
    assert [module.training for module in model.modules()] == modes


def test_outputs_can_take_part_in_training() -> None:
    """They are ordinary tensors, which autograd may save (inference-mode tensors it may not)."""
    model = tiny_model()
    out = NativeGenerator(model).generate(*prompts(), SamplingParams(4), rng())
    weight = torch.ones_like(out.rollout_logprobs, requires_grad=True)
    (weight * out.rollout_logprobs).sum().backward()
    assert torch.equal(weight.grad, out.rollout_logprobs)  # type: ignore[arg-type]
    assert not any(parameter.requires_grad is False for parameter in model.parameters())


def test_one_new_token_takes_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(decoder_for(tiny_model(), 16)), "step", None)
    out = NativeGenerator(tiny_model()).generate(*prompts(), SamplingParams(1), rng())
    assert out.response_mask.shape == (5, 1)


def test_the_pad_token_defaults_to_the_models_own() -> None:
    assert NativeGenerator(tiny_model()).pad_token_id == 2
    assert NativeGenerator(Recurrent()).pad_token_id == 0
    assert NativeGenerator(tiny_model(), pad_token_id=0).pad_token_id == 0


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1], [0, 0, 0]], r"rows \[1\] are empty or not padded on the left"),
        ([[1, 1, 0], [1, 1, 1]], r"rows \[0\] are empty or not padded on the left"),
        ([[1, 0, 1], [1, 1, 1]], r"rows \[0\] are empty or not padded on the left"),
        ([[1, 1]], r"shape \(2, 3\) and attention_mask \(1, 2\)"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(mask: list[list[int]], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        NativeGenerator(tiny_model()).generate(
            torch.full((2, 3), 5), torch.tensor(mask).bool(), SamplingParams(2), rng()
        )


def test_an_empty_batch_is_refused() -> None:
    empty = torch.zeros(0, 3, dtype=torch.long)
    with pytest.raises(GenerationError, match="at least one row"):
        NativeGenerator(tiny_model()).generate(empty, empty.bool(), SamplingParams(2), rng())


def test_a_prompt_too_long_for_the_context_is_refused() -> None:
    model = tiny_model(max_position_embeddings=16)
    ids, mask = prompts(width=10)
    with pytest.raises(GenerationError, match="10 tokens and max_new_tokens is 7, together more than .* 16"):
        NativeGenerator(model).generate(ids, mask, SamplingParams(7), rng())
    NativeGenerator(model).generate(ids, mask, SamplingParams(6), rng())
    wide = torch.cat([ids.new_full((5, 9), 2), ids], dim=1), torch.cat([~mask.new_ones(5, 9), mask], dim=1)
    NativeGenerator(model).generate(*wide, SamplingParams(6), rng())  # padding is no part of the context


def test_selected_rows_are_cut_to_their_longest() -> None:
    out = Generated(
        torch.tensor([[7, 1, 2, 3], [7, 4, 0, 0], [7, 5, 6, 0]]),
        torch.tensor([[True, True, True], [True, False, False], [True, True, False]]),
        -torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [5.0, 6.0, 0.0]]),
        ["length", "stop", "stop"],
    )
    part = out.select([2, 1])
    assert part.generated_ids.tolist() == [[7, 5, 6], [7, 4, 0]]
    assert part.response_mask.tolist() == [[True, True], [True, False]]
    assert part.rollout_logprobs.tolist() == [[-5.0, -6.0], [-4.0, 0.0]]
    assert part.finish_reasons == ["stop", "stop"]


def test_spare_memory_is_free_at_once() -> None:
    """The cache of a decoder for a GPU, here on the CPU: nothing else holds it."""
    model, (ids, mask) = family_model("llama"), prompts()
    generator = NativeGenerator(model, 0)
    assert not generator.spare()
    generator._graphed = GraphedDecoder(model, cache_argument(model) or "", 0)
    params, numbers = SamplingParams(5), torch.rand(len(ids), 5, dtype=torch.float64)
    with torch.no_grad():
        generator._graphed.generate(ids, mask, params, numbers)
    buffers = generator._graphed._buffers
    assert buffers is not None
    held = weakref.ref(buffers.rows.stored)
    del buffers
    assert generator.spare()
    assert held() is None
    assert not generator.spare()
