"""Log-probs and entropies of next-token distributions, from logits, in little memory.

Both come from one pass over the logits in slices of rows that fit a cache. No other (N, V) tensor is made in the
forward pass, and in the backward pass only the gradient itself. Rows are independent: a row gives the same bits in any
batch.

The distribution is the one that the tokens were drawn from, see `rlkit.algorithms.truncation`: softmax(logits /
temperature), and where the sampler kept some tokens alone, that of these tokens renormalised. The set is that of the
logits given, which may be those of another policy or rounded otherwise than the sampler's, so the token that was drawn
always counts as kept: its log-prob is finite. Tokens outside the set get no gradient. Rows that were sampled greedily
(temperature 0) have a distribution of one token: log-prob 0, entropy 0, no gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlkit.algorithms.truncation import Kind, Sampled, least_kept
from rlkit.errors import DataError
from rlkit.kernels import available
from rlkit.kernels.rows import row_gradients, row_scores

__all__ = ["Sampled", "entropy", "logprobs_and_entropy", "token_logprobs"]

_SLICE_ELEMENTS = {"cpu": 2**20}
_SLICE_ELEMENTS_ELSEWHERE = 2**25
_LEAST_LOGPROB = -1e4
"""Its probability is 0 in any floating-point format; stands for -inf where 0 * -inf must be 0."""


def token_logprobs(logits: Tensor, ids: Tensor, sampled: Sampled | float = 1.0) -> Tensor:
    """log p(ids) under the distribution that `sampled` makes of the logits, differentiable in the logits.

    Args:
        logits: (..., V) as the model gives them; half precision is computed in float32.
        ids: (...) int64, the tokens that were sampled.
        sampled: what they were sampled from, its values a row of shape (...); a number is a temperature above 0.

    Returns:
        (...) log-probs in nats, float32 (float64 for float64 logits).

    Raises:
        DataError: shapes do not fit.
        ConfigError: a temperature, top_k or top_p that no distribution has.
    """
    logprobs, _ = _scores(logits, ids, sampled, with_entropy=False)
    return logprobs


def entropy(logits: Tensor, sampled: Sampled | float = 1.0) -> Tensor:
    """Entropy (...) in nats of that distribution, differentiable. Args as for `token_logprobs`."""
    _, spread = _scores(logits, None, sampled, with_entropy=True)
    return spread


def logprobs_and_entropy(logits: Tensor, ids: Tensor, sampled: Sampled | float = 1.0) -> tuple[Tensor, Tensor]:
    """`token_logprobs` and `entropy` of the same distribution, from one pass over the logits."""
    return _scores(logits, ids, sampled, with_entropy=True)


def _scores(logits: Tensor, ids: Tensor | None, sampled: Sampled | float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    if logits.ndim < 1 or (ids is not None and ids.shape != logits.shape[:-1]):
        raise DataError(
            f"ids must have the shape of logits (..., V) without V, given logits {tuple(logits.shape)} and "
            f"ids {None if ids is None else tuple(ids.shape)}"
        )
    kinds = Sampled.of(sampled).kinds(logits.shape[:-1])
    flat = logits.reshape(-1, logits.shape[-1])
    tokens = None if ids is None else ids.reshape(-1)
    logprobs, spread = _RowScores.apply(flat, tokens, kinds, with_entropy)  # type: ignore[no-untyped-call]
    return logprobs.reshape(logits.shape[:-1]), spread.reshape(logits.shape[:-1])


def _parts(logits: Tensor, kind: Kind) -> Iterator[slice | Tensor]:
    """The rows of one kind, few enough at a time."""
    width = logits.shape[1]
    step = max(1, _SLICE_ELEMENTS.get(logits.device.type, _SLICE_ELEMENTS_ELSEWHERE) // max(width, 1))
    if kind.rows is not None:
        yield from torch.split(kind.rows.to(logits.device), step)
        return
    for start in range(0, len(logits), step):
        yield slice(start, start + step)


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """A private copy of logits / temperature."""
    return logits.to(dtype) / temperature if temperature != 1 else logits.to(dtype, copy=True)


def _cut(x: Tensor, bound: Tensor, ids: Tensor | None) -> Tensor:
    """-inf, in place, at logits (N, V) below the bound (N, 1), but for the tokens that were drawn."""
    if ids is None:
        return x.masked_fill_(x < bound, float("-inf"))
    own = x.gather(-1, ids.unsqueeze(-1))
    return x.masked_fill_(x < bound, float("-inf")).scatter_(-1, ids.unsqueeze(-1), own)


def _whole_rows(logits: Tensor, kinds: list[Kind]) -> float | None:
    """The temperature, where kernels can take all rows as they are: on a GPU, none of them greedy or cut off."""
    fits = available(logits.device) and logits.dtype != torch.float64 and logits.stride(-1) == 1
    if not fits or len(kinds) != 1 or kinds[0].is_greedy or kinds[0].truncates(logits.shape[1]):
        return None
    return kinds[0].temperature


class _RowScores(torch.autograd.Function):
    """(logits (N, V), ids (N,) | None) -> log-probs (N,), entropy (N,); the one that was not asked for says nothing.

    With x = logits / t, p = softmax(x) over the kept tokens and 0 elsewhere, H = -sum p log p:
        d logprob_i / d logits_j = (1[i = j] - p_j) / t,      d H / d logits_j = -p_j (log p_j + H) / t
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor | None, kinds: list[Kind], with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.kinds = kinds
        ctx.set_materialize_grads(False)
        ctx.whole = _whole_rows(logits, kinds)
        if ctx.whole is not None:
            chosen, normaliser, spread = row_scores(logits, ids, ctx.whole)
            ctx.save_for_backward(logits, ids, normaliser, spread, None)
            return chosen, spread
        dtype = torch.promote_types(logits.dtype, torch.float32)
        normaliser = logits.new_zeros(logits.shape[0], dtype=dtype)
        spread, chosen = torch.zeros_like(normaliser), torch.zeros_like(normaliser)
        bound = torch.full_like(normaliser, float("-inf"))
        own = None if ids is None else logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1).to(dtype)
        for kind in kinds:
            if kind.is_greedy:
                continue
            truncates = kind.truncates(logits.shape[1])
            for rows in _parts(logits, kind):
                x = _scaled(logits[rows], kind.temperature, dtype)
                if truncates:
                    least = least_kept(x, kind.top_k, kind.top_p)
                    bound[rows] = least.squeeze(-1)
                    x = _cut(x, least, None if ids is None else ids[rows])
                peak = x.amax(-1, keepdim=True)
                x = x.sub_(peak)
                weights = x.exp()
                total = weights.sum(-1)
                normaliser[rows] = peak.squeeze(-1) + total.log()
                if own is not None:
                    chosen[rows] = own[rows] / kind.temperature - normaliser[rows]
                if with_entropy:
                    spread[rows] = total.log() - torch.linalg.vecdot(weights, x.clamp_min_(_LEAST_LOGPROB)) / total
        ctx.save_for_backward(logits, ids, normaliser, spread, bound)
        return chosen, spread

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, ids, normaliser, spread, bound = ctx.saved_tensors
        if ctx.whole is not None:
            return row_gradients(logits, ids, normaliser, spread, (grads[0], grads[1]), ctx.whole), None, None, None
        grad_chosen, grad_spread = grads[0] if grads[0] is not None else torch.zeros_like(normaliser), grads[1]
        greedy = any(kind.is_greedy for kind in ctx.kinds)
        out = torch.zeros_like(logits) if greedy else torch.empty_like(logits)
        for kind in ctx.kinds:
            if kind.is_greedy:
                continue
            truncates = kind.truncates(logits.shape[1])
            for rows in _parts(logits, kind):
                x = _scaled(logits[rows], kind.temperature, normaliser.dtype)
                drawn = None if ids is None else ids[rows]
                if truncates:
                    x = _cut(x, bound[rows].unsqueeze(-1), drawn)
                x = x.sub_(normaliser[rows].unsqueeze(-1))
                pull = (grad_chosen[rows] / kind.temperature).unsqueeze(-1)
                if grad_spread is not None:
                    slope = x.clamp_min(_LEAST_LOGPROB).add_(spread[rows].unsqueeze(-1))
                    slope.mul_((grad_spread[rows] / kind.temperature).unsqueeze(-1)).add_(pull).neg_()
                    part = x.exp_().mul_(slope)
                else:
                    part = x.exp_().mul_(-pull)
                if drawn is not None:
                    column = drawn.unsqueeze(-1)
                    part.scatter_(-1, column, part.gather(-1, column) + pull)
                out[rows] = part.to(out.dtype)
        return out, None, None, None
