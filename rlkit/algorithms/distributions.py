"""Log-probs and entropies of next-token distributions, from logits, in little memory.

Both come from one pass over the logits in slices of rows that fit a cache. No other (N, V) tensor is made in the
forward pass, and in the backward pass only the gradient itself. Rows are independent: a row gives the same bits in any
batch.
"""

from typing import Any

import torch
from torch import Tensor

from rlkit.errors import ConfigError, DataError

__all__ = ["entropy", "logprobs_and_entropy", "token_logprobs"]

_SLICE_ELEMENTS = {"cpu": 2**20}
_SLICE_ELEMENTS_ELSEWHERE = 2**25
_LEAST_LOGPROB = -1e4
"""Its probability is 0 in any floating-point format; stands for -inf where 0 * -inf must be 0."""


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature)[ids], differentiable in the logits.

    Args:
        logits: (..., V) as the model gives them; half precision is computed in float32.
        ids: (...) int64, the tokens that were sampled.
        temperature: the temperature they were sampled at, above 0.

    Returns:
        (...) log-probs in nats, float32 (float64 for float64 logits).

    Raises:
        DataError: shapes do not fit.
        ConfigError: the temperature is not above 0.
    """
    logprobs, _ = _scores(logits, ids, temperature, with_entropy=False)
    return logprobs


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy (...) in nats of softmax(logits / temperature), differentiable. Args as for `token_logprobs`."""
    _, spread = _scores(logits, None, temperature, with_entropy=True)
    return spread


def logprobs_and_entropy(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """`token_logprobs` and `entropy` from one pass over the logits."""
    return _scores(logits, ids, temperature, with_entropy=True)


def _scores(logits: Tensor, ids: Tensor | None, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    if logits.ndim < 1 or (ids is not None and ids.shape != logits.shape[:-1]):
        raise DataError(
            f"ids must have the shape of logits (..., V) without V, given logits {tuple(logits.shape)} and "
            f"ids {None if ids is None else tuple(ids.shape)}"
        )
    if not temperature > 0:
        raise ConfigError(f"temperature must be above 0, given {temperature!r}")
    flat = logits.reshape(-1, logits.shape[-1])
    tokens = None if ids is None else ids.reshape(-1)
    logprobs, spread = _RowScores.apply(flat, tokens, float(temperature), with_entropy)  # type: ignore[no-untyped-call]
    return logprobs.reshape(logits.shape[:-1]), spread.reshape(logits.shape[:-1])


def _slices(logits: Tensor) -> list[slice]:
    rows, width = logits.shape
    step = max(1, _SLICE_ELEMENTS.get(logits.device.type, _SLICE_ELEMENTS_ELSEWHERE) // max(width, 1))
    return [slice(start, start + step) for start in range(0, rows, step)]


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """A private copy of logits / temperature."""
    return logits.to(dtype) / temperature if temperature != 1 else logits.to(dtype, copy=True)


class _RowScores(torch.autograd.Function):
    """(logits (N, V), ids (N,) | None) -> log-probs (N,), entropy (N,); zeros for the one that was not asked for.

    With x = logits / t, p = softmax(x), H = -sum p log p:
        d logprob_i / d logits_j = (1[i = j] - p_j) / t,      d H / d logits_j = -p_j (log p_j + H) / t
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor | None, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        normaliser = logits.new_zeros(logits.shape[0], dtype=dtype)
        spread = torch.zeros_like(normaliser)
        for rows in _slices(logits):
            x = _scaled(logits[rows], temperature, dtype)
            peak = x.amax(-1, keepdim=True)
            x = x.sub_(peak)
            weights = x.exp()
            total = weights.sum(-1)
            normaliser[rows] = peak.squeeze(-1) + total.log()
            if with_entropy:
                spread[rows] = total.log() - torch.linalg.vecdot(weights, x.clamp_min_(_LEAST_LOGPROB)) / total
        chosen = torch.zeros_like(normaliser)
        if ids is not None:
            chosen = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1).to(dtype) / temperature - normaliser
        ctx.save_for_backward(logits, ids, normaliser, spread)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen, spread

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, ids, normaliser, spread = ctx.saved_tensors
        given = [None if grad is None else grad / ctx.temperature for grad in grads]
        grad_chosen, grad_spread = given[0] if given[0] is not None else torch.zeros_like(normaliser), given[1]
        out = torch.empty_like(logits)
        for rows in _slices(logits):
            x = _scaled(logits[rows], ctx.temperature, normaliser.dtype).sub_(normaliser[rows].unsqueeze(-1))
            if grad_spread is not None:
                slope = x.clamp_min(_LEAST_LOGPROB).add_(spread[rows].unsqueeze(-1))
                slope.mul_(grad_spread[rows].unsqueeze(-1)).add_(grad_chosen[rows].unsqueeze(-1)).neg_()
                part = x.exp_().mul_(slope)
            else:
                part = x.exp_().mul_(-grad_chosen[rows].unsqueeze(-1))
            if ids is not None:
                column = ids[rows].unsqueeze(-1)
                part.scatter_(-1, column, part.gather(-1, column) + grad_chosen[rows].unsqueeze(-1))
            out[rows] = part
        return out, None, None, None
