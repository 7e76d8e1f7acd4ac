"""Draw tokens from logits by inverse CDF: one uniform number decides one token.

Which tokens can be drawn is decided in `rlkit.algorithms.truncation`, where the loss asks as well.
The caller draws the uniforms, so that a row's tokens depend on its own numbers only and not on which other rows are
still in the batch.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.algorithms.truncation import least_kept
from rlkit.generation.base import SamplingParams

__all__ = ["first_above", "goes_on", "sample"]

_BLOCK = 256


def sample(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits: (B, V) of any float dtype; -inf excludes a token. Left unchanged.
        params: temperature, top-k and top-p, applied in this order. Temperature 0 takes the most likely token.
        uniforms: (B,) float64 in [0, 1), on the device of the logits.

    Returns:
        tokens (B,) int64, and log-probs (B,) float32 of these tokens under the distribution that was sampled, that is
        renormalised over the kept tokens (0 for temperature 0: all mass is on one token).
    """
    if params.temperature == 0:
        return logits.argmax(-1), logits.new_zeros(logits.shape[0], dtype=torch.float32)
    scaled = logits.float() if params.temperature == 1 else logits.float() / params.temperature
    if 0 < params.top_k < scaled.shape[-1] or params.top_p < 1:
        scaled = scaled.masked_fill(scaled < least_kept(scaled, params.top_k, params.top_p), float("-inf"))
    return _inverse_cdf(scaled, uniforms)


def _inverse_cdf(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose cumulative probability exceeds the uniform, found block by block, with its log-prob."""
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).exp_()  # (B, V), unnormalised
    if weights.shape[-1] % _BLOCK:
        weights = pad(weights, (0, -weights.shape[-1] % _BLOCK))
    blocks = weights.view(len(weights), -1, _BLOCK)  # (B, blocks, _BLOCK)
    block_cdf = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    total = block_cdf[:, -1:]
    target = uniforms.unsqueeze(-1) * total
    block = first_above(block_cdf, target)
    before = torch.where(block > 0, block_cdf.gather(-1, (block - 1).clamp_min(0)), 0.0)
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1)
    offset = first_above(inside.cumsum(-1, dtype=torch.float64), target - before)
    # Rounding can leave the last step of a block short of the target; the last token with any mass is meant then.
    last_with_mass = _BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1, keepdim=True)
    tokens = block * _BLOCK + torch.minimum(offset, last_with_mass)
    logprobs = logits.gather(-1, tokens) - peak - total.log().float()
    return tokens.squeeze(-1), logprobs.squeeze(-1)


def first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """(B, 1) first index with cdf > target; the last index when there is none."""
    return (cdf <= target).sum(-1, keepdim=True).clamp_max(cdf.shape[-1] - 1)


def goes_on(tokens: Tensor, params: SamplingParams) -> Tensor:
    """(b,) which of the sampled tokens (b,) let their row go on: not those that stop it."""
    keeps = torch.ones_like(tokens, dtype=torch.bool)
    for stop in params.stop_token_ids:
        keeps = keeps & (tokens != stop)
    return keeps
