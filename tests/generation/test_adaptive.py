"""Short, middle and long prompts of one batch, each sampled in its own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.algorithms.truncation import Sampled
from rlkit.generation.adaptive import AdaptiveSampling
from rlkit.generation.base import Generated, SamplingParams
from rlkit.generation.gpu.graphed import GraphedDecoder
from rlkit.generation.native import NativeGenerator
from tests.generation.models import family_model, prompts, rng, teacher_forced

PARAMS = SamplingParams(8, stop_token_ids=(2, 3, 4, 5, 6, 7, 8, 9))
RULE = AdaptiveSampling(
    short=SamplingParams(8, temperature=0.0, stop_token_ids=PARAMS.stop_token_ids),
    long=SamplingParams(8, temperature=0.7, top_k=5, stop_token_ids=PARAMS.stop_token_ids),
    short_prompt=3,
    long_prompt=4,
)
SHORT, MIDDLE, LONG = [1, 3], [0, 5], [2, 4]


def mixed() -> tuple[Tensor, Tensor]:
    """Six prompts of 4, 2, 6, 1, 5 and 3 tokens."""
    ids, mask = prompts(6, 6)
    order = [2, 4, 0, 5, 1, 3]
    return ids[order], mask[order]


def responses(out: Generated) -> list[list[int]]:
    tails = out.generated_ids[:, -out.response_mask.shape[1] :]
    return [tail[keep].tolist() for tail, keep in zip(tails, out.response_mask, strict=True)]


def description(rule: AdaptiveSampling, mask: Tensor, params: SamplingParams = PARAMS) -> Sampled:
    rows = rule.settings(mask, params)
    return Sampled(
        torch.tensor([row.temperature for row in rows]),
        torch.tensor([row.top_k for row in rows]),
        torch.tensor([row.top_p for row in rows]),
    )


def test_prompts_under_64_tokens_are_short_and_those_over_512_long() -> None:
    mask = torch.arange(600) >= 600 - torch.tensor([1, 63, 64, 512, 513, 600])[:, None]
    rule = AdaptiveSampling(RULE.short, RULE.long)
    assert rule.kinds(mask).tolist() == [0, 0, 1, 1, 2, 2]
    rows = rule.settings(mask, PARAMS)
    assert [row is kind for row, kind in zip(rows[1:6:2], (RULE.short, PARAMS, RULE.long), strict=True)] == [True] * 3


def test_each_kind_is_sampled_in_its_own_way_and_rows_keep_their_places() -> None:
    ids, mask = mixed()
    generator = NativeGenerator(family_model("llama"))
    out = RULE.generate(generator, ids, mask, PARAMS, rng())
    greedy = generator.generate(ids[SHORT], mask[SHORT], RULE.short, rng(9))
    assert torch.equal(out.generated_ids[:, :6], ids)
    assert [responses(out)[row] for row in SHORT] == responses(greedy)
    assert not out.rollout_logprobs[SHORT].any()
    assert out.rollout_logprobs[MIDDLE + LONG][:, 0].all()
    lengths = out.response_mask.sum(1).tolist()
    assert [len(response) for response in responses(out)] == lengths
    assert len(set(lengths)) > 1
    assert out.response_mask.shape[1] == max(lengths)
    ended = [response[-1] in PARAMS.stop_token_ids for response in responses(out)]
    assert [reason == "stop" for reason in out.finish_reasons] == ended


def test_the_same_random_state_gives_the_same_responses_and_moves_on() -> None:
    ids, mask = mixed()
    generator = NativeGenerator(family_model("llama"))
    numbers = rng(1)
    first, second = (RULE.generate(generator, ids, mask, PARAMS, numbers) for _ in range(2))
    again = RULE.generate(generator, ids, mask, PARAMS, rng(1))
    assert responses(first) == responses(again)
    assert torch.equal(first.rollout_logprobs, again.rollout_logprobs)
    assert [responses(first)[row] for row in MIDDLE + LONG] != [responses(second)[row] for row in MIDDLE + LONG]


@pytest.mark.parametrize("others", [[], SHORT, MIDDLE, SHORT + MIDDLE])
def test_a_row_does_not_depend_on_the_rows_of_other_kinds(others: list[int]) -> None:
    ids, mask = mixed()
    generator = NativeGenerator(family_model("llama"))
    whole = RULE.generate(generator, ids, mask, PARAMS, rng(2))
    kept = sorted(LONG + others)
    part = RULE.generate(generator, ids[kept], mask[kept], PARAMS, rng(2))
    assert [responses(part)[kept.index(row)] for row in LONG] == [responses(whole)[row] for row in LONG]


def test_finished_rows_are_reported_under_their_own_numbers() -> None:
    ids, mask = mixed()
    reports: dict[int, tuple[list[int], str]] = {}

    def on_finished(rows: list[int], finished: Generated) -> None:
        assert not set(rows) & set(reports)
        assert torch.equal(finished.generated_ids[:, :6], ids[rows])
        reports.update(zip(rows, zip(responses(finished), finished.finish_reasons, strict=True), strict=True))

    out = RULE.generate(NativeGenerator(family_model("llama")), ids, mask, PARAMS, rng(3), on_finished)
    assert [reports[row] for row in range(6)] == list(zip(responses(out), out.finish_reasons, strict=True))


def test_an_engine_that_decodes_in_fixed_buffers_gives_the_same() -> None:
    """As on a GPU, where steps are captured for one setting: the buffers are used by one kind after another."""
    model = family_model("llama")
    decoder = GraphedDecoder(model, "past_key_values", 2, graphs=False)

    class Fixed:
        def generate(
            self, ids: Tensor, mask: Tensor, params: SamplingParams, rng: torch.Generator, on_finished: Any = None
        ) -> Generated:
            uniforms = torch.rand(len(ids), params.max_new_tokens, generator=rng, dtype=torch.float64)
            with torch.no_grad():
                return decoder.generate(ids, mask, params, uniforms, on_finished)

    ids, mask = mixed()
    fixed = RULE.generate(Fixed(), ids, mask, PARAMS, rng(4))
    plain = RULE.generate(NativeGenerator(model), ids, mask, PARAMS, rng(4))
    assert responses(fixed) == responses(plain)
    torch.testing.assert_close(fixed.rollout_logprobs, plain.rollout_logprobs, atol=2e-5, rtol=0)


WAYS = st.builds(
    lambda temperature, top_k, top_p: SamplingParams(6, temperature, top_p, top_k, stop_token_ids=(2, 3)),
    st.sampled_from([0.0, 0.4, 0.7, 1.0, 1.8]),
    st.sampled_from([0, 1, 3, 20]),
    st.sampled_from([0.3, 0.9, 1.0]),
)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@settings(max_examples=25, deadline=None)
@given(short=WAYS, middle=WAYS, long=WAYS, bounds=st.tuples(st.integers(0, 6), st.integers(0, 6)), seed=st.integers(0))
def test_a_teacher_forced_forward_gives_the_log_probs_that_the_sampler_gave(
    family: str, short: SamplingParams, middle: SamplingParams, long: SamplingParams, bounds: Any, seed: int
) -> None:
    rule = AdaptiveSampling(short, long, min(bounds), max(bounds))
    ids, mask = mixed()
    model = family_model(family)
    out = rule.generate(NativeGenerator(model), ids, mask, middle, rng(seed % 2**31))
    scored = teacher_forced(model, mask, out, description(rule, mask, middle))
    torch.testing.assert_close(scored, out.rollout_logprobs, atol=1e-4, rtol=0)
