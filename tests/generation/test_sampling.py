"""The sampler against the distributions it must sample, computed in float64 by other means."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.errors import GenerationError
from rlkit.generation.base import SamplingParams
from rlkit.generation.sampling import sample

SKEWED = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
ALMOST_ONE = 1 - 2**-53


def grid(n: int) -> torch.Tensor:
    """(n,) uniforms in the middle of n equal parts of [0, 1)."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def expected(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """(V,) probabilities after temperature, top-k and top-p, by sorting, in float64. Ties of the last one stay."""
    scaled = (logits.astype(np.float32) / np.float32(params.temperature)).astype(np.float64)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-scaled, kind="stable")
    if params.top_k:
        probs[scaled < scaled[order[: params.top_k][-1]]] = 0
        probs /= probs.sum()
    mass, last = 0.0, order[-1]
    for token in order:
        mass, last = mass + probs[token], token
        if params.top_p < 1 and mass >= params.top_p - 1e-6:
            break
    probs[scaled < scaled[last]] = 0
    return probs / probs.sum()


def test_top_k_is_applied_before_top_p() -> None:
    # top-k 2 leaves 0.625 and 0.375; top-p 0.6 then keeps the first alone, though 0.5 of the full mass is below 0.6.
    tokens, logprobs = sample(SKEWED.expand(100, 4), SamplingParams(1, top_k=2, top_p=0.6), grid(100))
    assert tokens.tolist() == [0] * 100
    assert logprobs.tolist() == pytest.approx([0.0] * 100, abs=1e-6)


def test_greedy_takes_the_most_likely_token_with_certainty() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    tokens, logprobs = sample(logits, SamplingParams(1, temperature=0), torch.full((2,), 0.999, dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("vocabulary", [2, 3, 255, 256, 257, 1000])
def test_tokens_are_those_of_the_inverse_cdf(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(200, vocabulary, generator=generator) * 3
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    tokens, logprobs = sample(logits, SamplingParams(1), uniforms)
    probs = logits.double().softmax(-1).numpy()
    reference = [
        int(np.searchsorted(np.cumsum(p), u, side="right")) for p, u in zip(probs, uniforms.tolist(), strict=True)
    ]
    # float32 weights may put a boundary elsewhere by 1e-6 of mass: one row in a thousand at most is decided by that
    assert (tokens.numpy() == np.array(reference)).mean() >= 0.99
    picked = logits.double().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs.double(), picked, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.6),
        SamplingParams(1, top_k=7),
        SamplingParams(1, temperature=1.3, top_k=20, top_p=0.9),
    ],
)
def test_frequencies_pass_a_chi_square_test(params: SamplingParams) -> None:
    draws, vocabulary = 40_000, 600
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(5)) * 2
    uniforms = torch.rand(draws, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    tokens = torch.cat([sample(logits.expand(len(u), -1), params, u)[0] for u in uniforms.split(4000)])
    counts = np.bincount(tokens.numpy(), minlength=vocabulary)
    mean = expected(logits.numpy(), params) * draws
    assert counts[mean == 0].sum() == 0
    usual = mean >= 5
    pooled = np.append(counts[usual], counts[~usual].sum()), np.append(mean[usual], mean[~usual].sum())
    counts, mean = (part[pooled[1] > 0] for part in pooled)
    freedom = len(counts) - 1
    chi_square = float(((counts - mean) ** 2 / mean).sum())
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)  # five standard deviations above its mean


def test_a_wrong_distribution_fails_the_same_chi_square_test() -> None:
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    tokens, _ = sample(SKEWED.expand(10_000, 4) / 1.1, SamplingParams(1), grid(10_000))
    counts = np.bincount(tokens.numpy(), minlength=4)
    assert float(((counts - probs * 10_000) ** 2 / (probs * 10_000)).sum()) > 3 + 5 * math.sqrt(6)


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
@pytest.mark.parametrize("params", [SamplingParams(1), SamplingParams(1, top_k=300), SamplingParams(1, top_p=0.999)])
def test_excluded_tokens_are_never_drawn(uniform: float, params: SamplingParams) -> None:
    logits = torch.zeros(1, 1000)
    logits[:, :300] = logits[:, 301:] = float("-inf")
    tokens, logprobs = sample(logits, params, torch.tensor([uniform], dtype=torch.float64))
    assert tokens.tolist() == [300]
    assert logprobs.item() == pytest.approx(0, abs=1e-6)


def test_the_ends_of_the_unit_interval_give_the_first_and_last_token() -> None:
    ends = torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64)
    tokens, _ = sample(torch.zeros(2, 513), SamplingParams(1), ends)
    assert tokens.tolist() == [0, 512]


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.2, 0.7, 0.95, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_log_probs_belong_to_the_truncated_distribution(
    logits: list[float], temperature: float, top_k: int, top_p: float, uniform: float
) -> None:
    params = SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p)
    row = np.array(logits, dtype=np.float32)
    token, logprobs = sample(torch.from_numpy(row)[None], params, torch.tensor([uniform], dtype=torch.float64))
    assert math.exp(logprobs.item()) == pytest.approx(expected(row, params)[token.item()], abs=1e-4)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(8, 700, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for params in (SamplingParams(1), SamplingParams(1, temperature=0.7, top_k=50, top_p=0.9)):
        tokens, logprobs = sample(logits, params, uniforms)
        for row in range(8):
            alone, logprob = sample(logits[row : row + 1], params, uniforms[row : row + 1])
            assert alone.item() == tokens[row].item()
            assert logprob.item() == logprobs[row].item()


def test_logits_are_left_unchanged_and_half_precision_is_widened() -> None:
    logits = torch.randn(4, 300)
    before = logits.clone()
    sample(logits, SamplingParams(1), grid(4))
    assert torch.equal(logits, before)
    half = logits.bfloat16()
    tokens, logprobs = sample(half, SamplingParams(1), grid(4))
    wide, _ = sample(half.float(), SamplingParams(1), grid(4))
    assert torch.equal(tokens, wide)
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": 1e-38}, "temperature is 1e-38.*at least 1e-30"),
        ({"top_k": 2.5}, "top_k is 2.5; expected a whole number"),
        ({"max_new_tokens": 3.5}, "max_new_tokens is 3.5; expected a whole number"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        SamplingParams(**{"max_new_tokens": 4, **wrong})  # type: ignore[arg-type]


def test_truncating_settings_say_so() -> None:
    assert not SamplingParams(1, temperature=0.7).truncates
    assert all(SamplingParams(1, **p).truncates for p in ({"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}))  # type: ignore[arg-type]
