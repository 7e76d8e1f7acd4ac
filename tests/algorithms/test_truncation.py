"""Truncated distributions: goldens by hand, gradients, ties, rows of several settings, one rule with the sampler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.algorithms import distributions, truncation
from rlkit.algorithms.distributions import entropy, logprobs_and_entropy, token_logprobs
from rlkit.algorithms.truncation import Sampled, least_kept
from rlkit.errors import ConfigError, DataError
from rlkit.generation.base import SamplingParams
from rlkit.generation.sampling import sample

SKEWED = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()


def random_logits(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(sum(shape))
    logits = 3 * torch.randn(*shape, generator=rng, dtype=dtype)
    return logits, torch.randint(shape[-1], shape[:-1], generator=rng)


def by_sorting(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """(V,) bool of one row: the tokens kept, one after another from the most likely one."""
    scaled = logits / temperature
    order = scaled.argsort(descending=True).tolist()
    first = order[: top_k or None]
    kept = [token for token in order if scaled[token] >= scaled[first[-1]]]
    probs = scaled[kept].softmax(0).tolist()
    mass, last = 0.0, kept[-1]
    for last, p in zip(kept, probs, strict=True):  # noqa: B007
        mass += p
        if top_p < 1 and mass >= top_p - 1e-6:
            break
    return scaled >= scaled[last]


@pytest.mark.parametrize(
    ("sampled", "token", "logprob", "spread", "grad", "grad_of_spread"),
    [
        # Two tokens are left, 0.625 and 0.375; H = -0.625 ln 0.625 - 0.375 ln 0.375; dH/dx0 = -0.625 (ln 0.625 + H).
        (Sampled(1.0, 2), 0, -0.47000, 0.66156, [0.375, -0.375, 0, 0], [-0.11972, 0.11972, 0, 0]),
        (Sampled(1.0, 2), 1, -0.98083, 0.66156, [-0.625, 0.625, 0, 0], [-0.11972, 0.11972, 0, 0]),
        (Sampled(1.0, 0, 0.8), 0, -0.47000, 0.66156, [0.375, -0.375, 0, 0], [-0.11972, 0.11972, 0, 0]),
        # At temperature 0.5 the masses are 0.25 and 0.09 of 0.34, and the gradient is twice as steep.
        (Sampled(0.5, 0, 0.8), 0, -0.30748, 0.57792, [0.52941, -0.52941, 0, 0], [-0.39770, 0.39770, 0, 0]),
        # top-k 2 leaves 0.625, which top-p 0.6 is content with, though 0.5 of the full mass would not do.
        (Sampled(1.0, 2, 0.6), 0, 0.0, 0.0, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_goldens(
    sampled: Sampled, token: int, logprob: float, spread: float, grad: list[float], grad_of_spread: list[float]
) -> None:
    logits = SKEWED.clone().requires_grad_()
    computed = logprobs_and_entropy(logits, torch.tensor(token), sampled)
    assert computed[0].item() == pytest.approx(logprob, abs=1e-5)
    assert computed[1].item() == pytest.approx(spread, abs=1e-5)
    for value, wanted in zip(computed, (grad, grad_of_spread), strict=True):
        (found,) = torch.autograd.grad(value, logits, retain_graph=True)
        assert found.tolist() == pytest.approx(wanted, abs=1e-5)


def test_the_token_that_was_drawn_always_counts_as_kept() -> None:
    """Of 0.5, 0.3 and 0.05 the last one has ln(0.05 / 0.85); the third token stays out."""
    logits = SKEWED.clone().requires_grad_()
    logprob = token_logprobs(logits, torch.tensor(3), Sampled(1.0, 2))
    assert logprob.item() == pytest.approx(-2.83321, abs=1e-5)
    (grad,) = torch.autograd.grad(logprob, logits)
    assert grad.tolist() == pytest.approx([-0.58824, -0.35294, 0.0, 0.94118], abs=1e-5)


def test_tokens_as_likely_as_the_last_one_kept_are_kept_wherever_they_stand() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0])
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 0, 2, 4, 3]):
        shuffled = logits[order]
        assert (shuffled >= least_kept(shuffled[None], 2, 1.0)).sum() == 2
        assert (shuffled >= least_kept(shuffled[None], 3, 1.0)).sum() == 5
        # The top 3 and their ties have masses 0.5761, 0.2119 and three times 0.0780 of e^3 + e^2 + 3 e; after two
        # tokens 0.7734 is reached, after three 0.8489.
        assert (shuffled >= least_kept(shuffled[None], 3, 0.75)).sum() == 2
        assert (shuffled >= least_kept(shuffled[None], 3, 0.80)).sum() == 5


def test_ties_count_in_the_mass_that_top_p_divides() -> None:
    """e^3, e^2 and three times e: two tokens hold 27.4746 of 35.6294, that is 0.7711."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 1.0, 1.0]])
    assert (logits >= least_kept(logits, 3, 0.7710)).sum() == 2
    assert (logits >= least_kept(logits, 3, 0.7712)).sum() == 5


def test_the_first_tokens_and_the_whole_vocabulary_give_the_same_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat rows need more tokens than are looked at first, peaked ones fewer."""
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[0.1], [1.0], [3.0], [9.0]] * 2
    )
    whole = [least_kept(logits, top_k, top_p) for top_k in (0, 100) for top_p in (0.3, 0.9, 0.999)]
    for few in (1, 7, 40):
        monkeypatch.setattr(truncation, "_FEW", few)
        cut = [least_kept(logits, top_k, top_p) for top_k in (0, 100) for top_p in (0.3, 0.9, 0.999)]
        assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))
    kept = [int((logits[row] >= whole[1][row]).sum()) for row in range(4)]
    assert kept[0] > 200
    assert kept[3] < 7


@pytest.mark.parametrize("sampled", [Sampled(0.7, 5), Sampled(1.5, 0, 0.6), Sampled(0.9, 6, 0.8)], ids=str)
def test_gradients_agree_with_finite_differences(sampled: Sampled) -> None:
    logits, ids = random_logits(4, 11)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: logprobs_and_entropy(x, ids, sampled), (logits,))
    assert torch.autograd.gradcheck(lambda x: entropy(x, sampled), (logits,))


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=2, max_size=30),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.2, 0.7, 0.95, 1.0]),
    token=st.integers(0, 29),
)
def test_values_and_gradients_agree_with_a_softmax_over_the_kept_tokens(
    logits: list[int], temperature: float, top_k: int, top_p: float, token: int
) -> None:
    row = (torch.tensor(logits, dtype=torch.float64) / 4).requires_grad_()
    token %= len(logits)
    kept = by_sorting(row.detach(), temperature, top_k, top_p)
    kept[token] = True
    plain = (row / temperature).masked_fill(~kept, -math.inf).log_softmax(0)
    wanted = plain[token], -(plain[kept].exp() * plain[kept]).sum()
    computed = logprobs_and_entropy(row, torch.tensor(token), Sampled(temperature, top_k, top_p))
    for one, other in zip(computed, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)
        grads = [torch.autograd.grad(value, row, retain_graph=True)[0] for value in (one, other)]
        torch.testing.assert_close(*grads, atol=1e-9, rtol=0)


MIXED = Sampled(
    torch.tensor([0.7, 0.0, 1.0, 0.7, 1.0, 0.5]),
    torch.tensor([5, 0, 0, 5, 0, 3]),
    torch.tensor([1.0, 1.0, 1.0, 1.0, 0.6, 0.9]),
)


@pytest.mark.parametrize("elements", [2**20, 50])
def test_rows_of_several_settings_give_the_bits_they_give_alone(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(distributions._SLICE_ELEMENTS, "cpu", elements)
    logits, ids = random_logits(6, 40, dtype=torch.float32)

    def scores(rows: slice, sampled: Sampled | float) -> tuple[Tensor, ...]:
        part = logits[rows].clone().requires_grad_()
        logprobs, spread = logprobs_and_entropy(part, ids[rows], sampled)
        (logprobs + 0.1 * spread).sum().backward()
        assert part.grad is not None
        return logprobs.detach(), spread.detach(), part.grad

    whole = scores(slice(None), MIXED)
    for row in range(6):
        rows = slice(row, row + 1)
        alone: Any = scores(rows, MIXED.rows(rows))
        for values, lonely in zip(whole, alone, strict=True):
            assert torch.equal(values[rows], lonely)
        if row != 1:
            temperature, top_k, top_p = (part[row].item() for part in (MIXED.temperature, MIXED.top_k, MIXED.top_p))
            for values, lonely in zip(whole, scores(rows, Sampled(temperature, int(top_k), top_p)), strict=True):
                assert torch.equal(values[rows], lonely)


def test_greedy_rows_have_a_distribution_of_one_token() -> None:
    logits, ids = random_logits(6, 40)
    logits.requires_grad_()
    logprobs, spread = logprobs_and_entropy(logits, ids, MIXED)
    assert logprobs[1] == spread[1] == 0
    (logprobs + spread).sum().backward()
    assert logits.grad is not None
    assert not logits.grad[1].any()
    assert logits.grad[[0, 2, 3, 4, 5]].any(1).all()
    all_greedy = token_logprobs(logits, ids, Sampled(torch.zeros(6)))
    assert torch.equal(all_greedy, torch.zeros(6, dtype=torch.float64))


def test_a_description_follows_its_rows() -> None:
    mask = torch.tensor([[True, False], [True, True], [False, False], [True, False], [True, True], [False, True]])
    spread = MIXED.rows(mask)
    assert spread.top_k.tolist() == [5, 0, 0, 5, 0, 0, 3]  # type: ignore[union-attr]
    assert MIXED.rows(torch.tensor([5, 0])).top_k.tolist() == [3, 5]  # type: ignore[union-attr]
    assert MIXED.rows(slice(2, 4)).top_k.tolist() == [0, 5]  # type: ignore[union-attr]
    assert Sampled(0.5, 3).rows(mask) == Sampled(0.5, 3)
    logits = torch.zeros(2, 3, 8)
    per_row = Sampled(torch.tensor([[1.0, 1, 1], [0, 0, 0]]), 4)
    assert token_logprobs(logits[:, :, :4], torch.zeros(2, 3, dtype=torch.int64), per_row).tolist() == [
        pytest.approx([-math.log(4)] * 3),
        [0.0] * 3,
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    coarse=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.2, 0.7, 0.9, 1.0]),
)
def test_the_sampler_and_the_loss_agree_on_every_token_that_can_be_drawn(
    seed: int, coarse: bool, dtype: torch.dtype, temperature: float, top_k: int, top_p: float
) -> None:
    """On the same logits, many of them equal where they are coarse: to float32 rounding, and not one token apart."""
    logits = 3 * torch.randn(1, 30, generator=torch.Generator().manual_seed(seed))
    logits = (logits.round() if coarse else logits).to(dtype)
    uniforms = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    tokens, logprobs = sample(logits.expand(3000, -1), SamplingParams(1, temperature, top_p, top_k), uniforms)
    scored = token_logprobs(logits.expand(3000, -1), tokens, Sampled(temperature, top_k, top_p))
    torch.testing.assert_close(scored, logprobs, atol=2e-6, rtol=2e-6)
    drawn = torch.unique(tokens)
    everything = token_logprobs(logits.expand(len(drawn), -1), drawn, Sampled(temperature, top_k, top_p)).exp().sum()
    assert everything > 0.95  # what 3000 even draws leave out is tokens of less than one draw each


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        (Sampled(0.0), "temperature must be above 0, given 0.0"),
        (Sampled(torch.tensor([1.0, -0.5])), "temperature must be above 0, given -0.5"),
        (Sampled(torch.tensor([1.0, math.nan])), "temperature must be above 0, given nan"),
        (Sampled(1.0, -1), "top_k must be 0"),
        (Sampled(1.0, 0, 0.0), "top_p must be above 0"),
        (Sampled(1.0, 0, torch.tensor([1.0, 1.5])), "top_p must be above 0 and at most 1"),
    ],
)
def test_what_no_distribution_has_is_refused(sampled: Sampled, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        token_logprobs(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), sampled)


def test_settings_of_other_rows_are_refused() -> None:
    with pytest.raises(DataError, match=r"shape \(3,\); expected one a row, \(2,\)"):
        token_logprobs(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), Sampled(torch.ones(3)))


def test_settings_that_are_alike_become_numbers() -> None:
    rows = torch.tensor([1.0, 1.0])
    alike = Sampled(rows, torch.tensor([5, 5]), torch.tensor([0.9, 0.8])).alike()
    assert (alike.temperature, alike.top_k) == (1.0, 5)
    assert torch.equal(torch.as_tensor(alike.top_p), torch.tensor([0.9, 0.8]))
    assert Sampled(0.7, 3, 0.5).alike() == Sampled(0.7, 3, 0.5)
    greedy = Sampled(torch.zeros(2), 0, 1.0).alike()  # a number must be above 0
    assert isinstance(greedy.temperature, torch.Tensor)
    empty = Sampled(torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0)).alike()
    assert isinstance(empty.temperature, torch.Tensor)
