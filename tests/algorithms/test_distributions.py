"""Log-probs and entropies: goldens, gradients, independence of rows, extreme logits."""

import math

import pytest
import torch
from torch import Tensor

from rlkit.algorithms import distributions
from rlkit.algorithms.distributions import entropy, logprobs_and_entropy, token_logprobs
from rlkit.errors import DataError


def _random(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(sum(shape))
    logits = 3 * torch.randn(*shape, generator=rng, dtype=dtype)
    return logits, torch.randint(shape[-1], shape[:-1], generator=rng)


def test_uniform_entropy_is_the_logarithm_of_the_vocabulary() -> None:
    assert entropy(torch.zeros(2, 50)).tolist() == pytest.approx([math.log(50)] * 2)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_agree_with_log_softmax(temperature: float) -> None:
    logits, ids = _random(4, 5, 23)
    logits.requires_grad_()
    plain = (logits / temperature).log_softmax(-1)
    wanted = plain.gather(-1, ids[..., None]).squeeze(-1), -(plain.exp() * plain).sum(-1)
    pull = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    computed = logprobs_and_entropy(logits, ids, temperature)
    torch.testing.assert_close(computed, wanted, atol=1e-12, rtol=1e-10)
    for weights in (
        pull,
        pull * torch.tensor([1.0, 0.0])[:, None, None],
        pull * torch.tensor([0.0, 1.0])[:, None, None],
    ):
        (grad,) = torch.autograd.grad((torch.stack(computed) * weights).sum(), logits, retain_graph=True)
        (expected,) = torch.autograd.grad((torch.stack(wanted) * weights).sum(), logits, retain_graph=True)
        torch.testing.assert_close(grad, expected, atol=1e-12, rtol=1e-10)


def test_gradients_agree_with_finite_differences() -> None:
    logits, ids = _random(3, 7)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: logprobs_and_entropy(x, ids, 0.7), (logits,))
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, 1.5), (logits,))
    assert torch.autograd.gradcheck(entropy, (logits,))


def test_one_pass_gives_the_same_bits_as_two() -> None:
    logits, ids = _random(6, 31, dtype=torch.float32)
    logprobs, spread = logprobs_and_entropy(logits, ids, 0.8)
    assert torch.equal(logprobs, token_logprobs(logits, ids, 0.8))
    assert torch.equal(spread, entropy(logits, 0.8))


def test_slices_and_batches_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids = _random(40, 300, dtype=torch.float32)

    def scores(rows: slice) -> tuple[Tensor, ...]:
        part = logits[rows].clone().requires_grad_()
        logprobs, spread = logprobs_and_entropy(part, ids[rows])
        (logprobs + 0.1 * spread).sum().backward()
        assert part.grad is not None
        return logprobs.detach(), spread.detach(), part.grad

    whole = scores(slice(None))
    for values, alone in zip(whole, scores(slice(7, 8)), strict=True):
        assert torch.equal(values[7:8], alone)
    monkeypatch.setitem(distributions._SLICE_ELEMENTS, "cpu", 1000)
    for values, sliced in zip(whole, scores(slice(None)), strict=True):
        assert torch.equal(values, sliced)


def test_tokens_that_cannot_be_drawn_give_no_nan() -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf, 0.5]], requires_grad=True)
    logprobs, spread = logprobs_and_entropy(logits, torch.tensor([1]))
    (logprobs + spread).sum().backward()
    short = torch.tensor([[1.0, 2.0, 0.5]], requires_grad=True)
    expected = logprobs_and_entropy(short, torch.tensor([1]))
    torch.testing.assert_close((logprobs, spread), expected)
    (expected[0] + expected[1]).sum().backward()
    assert logits.grad is not None
    assert short.grad is not None
    torch.testing.assert_close(logits.grad[:, [0, 1, 3]], short.grad)
    assert logits.grad[0, 2] == 0
    assert token_logprobs(logits, torch.tensor([2])).item() == -math.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits, ids = _random(5, 64, dtype=torch.float32)
    half = logits.to(dtype).requires_grad_()
    logprobs, spread = logprobs_and_entropy(half, ids)
    expected = logprobs_and_entropy(half.detach().float(), ids)
    assert logprobs.dtype == spread.dtype == torch.float32
    torch.testing.assert_close((logprobs.detach(), spread.detach()), expected)
    logprobs.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == dtype


def test_no_rows_give_no_rows() -> None:
    logits = torch.zeros(0, 9, requires_grad=True)
    logprobs, spread = logprobs_and_entropy(logits, torch.zeros(0, dtype=torch.int64))
    (logprobs.sum() + spread.sum()).backward()
    assert logprobs.shape == spread.shape == (0,)


def test_ids_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match=r"logits \(2, 4, 9\) and ids \(2, 5\)"):
        token_logprobs(torch.zeros(2, 4, 9), torch.zeros(2, 5, dtype=torch.int64))
