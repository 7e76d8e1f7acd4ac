"""From token losses (B, T) to one number, exact under any split into micro-batches.

Every mode is a weighted sum of token losses. The weights depend on the mask of the whole minibatch only, so they are
computed once and sliced along with the rows:

    weights = token_weights(minibatch_mask, "token-mean")
    for rows in micro_batches:
        loss = (token_loss(rows) * weights[rows]).sum()
        loss.backward()

and the accumulated gradient is that of the whole minibatch, for every split, order and padding width.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from rlkit.algorithms.masked import EPSILON, masked_sum
from rlkit.algorithms.shapes import require_rank, require_same_shape
from rlkit.errors import ConfigError

__all__ = ["AggregationMode", "aggregate", "token_weights"]

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


def token_weights(
    mask: Tensor, mode: str, fixed_length: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Weight of each token (B, T), 0 outside the mask. N tokens, S responses with a token, n_i tokens in response i.

    - "token-mean": 1 / N. Every token counts the same (DAPO, Yu et al. 2025).
    - "token-sum": 1.
    - "seq-mean-token-sum": 1 / S. Long responses count more, by length.
    - "seq-mean-token-mean": 1 / (S n_i). Every response counts the same (GRPO, Shao et al. 2024).
    - "seq-mean-token-sum-norm": 1 / (S fixed_length). No length bias (Dr. GRPO, Liu et al. 2025).

    A response without tokens does not count in S, and a mask without tokens gives zeros.

    Args:
        mask: (B, T) bool or 0/1, of the whole minibatch.
        mode: one of the above.
        fixed_length: the length limit of responses in tokens, for "seq-mean-token-sum-norm".
        dtype: of the weights.

    Raises:
        ConfigError: unknown mode, or no positive `fixed_length` where one is needed.
    """
    require_rank(2, mask=mask)
    if mode not in get_args(AggregationMode):
        raise ConfigError(f"unknown loss aggregation {mode!r}; expected one of {', '.join(get_args(AggregationMode))}")
    weights = mask.bool().to(dtype)
    lengths = weights.sum(1, keepdim=True)
    responses = (lengths > 0).sum().clamp_min(1).to(dtype)
    if mode == "token-mean":
        return weights / lengths.sum().clamp_min(1)
    if mode == "token-sum":
        return weights
    if mode == "seq-mean-token-sum":
        return weights / responses
    if mode == "seq-mean-token-mean":
        return weights / (lengths + EPSILON) / responses
    if fixed_length is None or fixed_length < 1:
        raise ConfigError(f"{mode!r} needs fixed_length, the length limit of responses (> 0), given {fixed_length!r}")
    return weights / (responses * fixed_length)


def aggregate(token_loss: Tensor, mask: Tensor, mode: str, fixed_length: int | None = None) -> Tensor:
    """The loss (0-d) of a whole minibatch: sum of token losses times `token_weights`.

    Args:
        token_loss: (B, T) floating point.
        mask, mode, fixed_length: as for `token_weights`.
    """
    require_same_shape(token_loss=token_loss, mask=mask)
    weights = token_weights(mask, mode, fixed_length, dtype=torch.promote_types(token_loss.dtype, torch.float32))
    return masked_sum(token_loss * weights, mask)
