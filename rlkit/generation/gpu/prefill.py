"""Prompts of rows that begin: their keys and values go into slots, and come back as logits of the first token.

For the Llama family it is written out with fused kernels where there are any: ten operations a layer. Other models run
their own forward, and its cache is copied out.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlkit.generation.decoders import CachedDecoder
from rlkit.generation.gpu.fused import FusedLayer, add_and_normalise
from rlkit.generation.gpu.steps import FusedStep, Step
from rlkit.generation.llama import normalise
from rlkit.kernels.rotary import rotated

__all__ = ["FusedPrefill", "ModelPrefill", "Prefill", "prefill_of"]

_AT_ONCE = 1 << 26
"""Bytes of keys and values that are on their way into slots at once."""
_ALIGNED = 16
"""Rows of an attention bias start at multiples of this, or torch lays them out so again in each layer."""


class Prefill(Protocol):
    """Takes in prompts."""

    can_be_captured: bool
    """As a graph: it never waits for the device."""

    def __call__(
        self, ids: Tensor, mask: Tensor, padded: bool, stored: Tensor, slots: Tensor, row_of: Tensor
    ) -> Tensor:
        """A forward over distinct prompts; each row's slot gets the keys and values of its prompt's columns.

        Args:
            ids, mask: (u, P) prompts, padded on the left. A padding column's keys and values are of no meaning.
            padded: whether any of them is.
            stored: (layers, 2, b, key heads, W, D) keys and values of all slots, W at least P.
            slots: (k,) int64, distinct.
            row_of: (k,) int64, the prompt of each slot.

        Returns:
            (u, V) logits of the token after each prompt.
        """
        ...


def prefill_of(model: nn.Module, cache_argument: str, step: Step) -> Prefill:
    """What takes in the prompts that a step decodes after; `cache_argument` is the model's name for a cache."""
    return FusedPrefill(step) if isinstance(step, FusedStep) else ModelPrefill(model, cache_argument)


class ModelPrefill:
    """The model's own forward. The device is not waited for, unless prompts are padded, which transformers looks at."""

    can_be_captured = False

    def __init__(self, model: nn.Module, cache_argument: str) -> None:
        self.model, self.cache_argument = model, cache_argument

    def __call__(
        self, ids: Tensor, mask: Tensor, padded: bool, stored: Tensor, slots: Tensor, row_of: Tensor
    ) -> Tensor:
        prompt = CachedDecoder(self.model, self.cache_argument, whole=True, padded=padded)
        logits = prompt.prefill(ids, mask)
        width = ids.shape[1]
        for own, layer in zip(stored, prompt.cache.layers, strict=True):
            own[0, slots, :, :width] = layer.keys[row_of]
            own[1, slots, :, :width] = layer.values[row_of]
        return logits


class FusedPrefill:
    """The Llama family with fused kernels, over the layers of a step; the device is never waited for."""

    can_be_captured = True

    def __init__(self, step: FusedStep) -> None:
        self.step = step

    def __call__(
        self, ids: Tensor, mask: Tensor, padded: bool, stored: Tensor, slots: Tensor, row_of: Tensor
    ) -> Tensor:
        count, width = ids.shape
        begin = width - mask.sum(-1, keepdim=True)  # (u, 1)
        x = self.step.trunk.embed_tokens(ids.flatten())  # (u * P, H)
        positions = torch.arange(width, device=ids.device) - begin
        cos, sin = (part.flatten(0, 1) for part in self.step.trunk.rotary_emb(x, positions))  # (u * P, D)
        bias = _bias(begin, width, x.dtype) if padded else None
        normed = normalise(self.step.norms[0], x)
        layers, shape = self.step.layers, (count, width, -1, stored.shape[-1])
        kept = stored.new_empty(len(layers), 2, count, width, stored.shape[3], stored.shape[-1])
        for layer, own, after in zip(layers, kept, self.step.norms[1:], strict=True):
            query, key, value = _heads(layer, normed, cos, sin, shape)
            torch.stack([key, value], out=own)
            attended = _attended(query, key, value, bias, layer.attention.scaling)
            if layer is layers[-1]:  # only a prompt's last token has something to say from here on
                x, attended = (part.view(count, width, -1)[:, -1] for part in (x, attended))
            x, normed = add_and_normalise(x, layer.out(attended), layer.norm)
            x, normed = add_and_normalise(x, layer.feed_forward(normed), after)
        _spread(kept, stored[..., :width, :], slots, row_of)
        logits: Tensor = self.step.head(normed)
        return logits


def _spread(kept: Tensor, stored: Tensor, slots: Tensor, row_of: Tensor) -> None:
    """Keys and values of prompts (layers, 2, u, P, heads, D) into slots of `stored` (layers, 2, b, heads, P, D)."""
    bytes_of_layer = kept[0, :, 0].nbytes * len(slots)
    several = max(1, _AT_ONCE // bytes_of_layer)
    for some, own in zip(torch.split(kept, several), torch.split(stored, several), strict=True):
        own[:, :, slots] = some.index_select(2, row_of).transpose(3, 4)


def _heads(
    layer: FusedLayer, normed: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries (u, P, heads, D), rotated keys and values (u, P, key heads, D) of normed tokens (u * P, H)."""
    query, key, value = layer.projected(normed, shape[-1])
    turned = rotated(_beside(query, key).view(len(normed), *shape[2:]), cos, sin)
    heads = query.shape[1] // shape[-1]
    return turned[:, :heads].view(shape), turned[:, heads:].view(shape), value.view(shape)


def _beside(left: Tensor, right: Tensor) -> Tensor:
    """(N, A) and (N, B) as (N, A + B): a view, where they lie so in one tensor."""
    end = left.data_ptr() + left.shape[1] * left.element_size()
    together = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr() and right.data_ptr() == end
    if not together or left.stride() != right.stride():
        return torch.cat([left, right], dim=1)
    return left.as_strided((len(left), left.shape[1] + right.shape[1]), left.stride())


def _bias(begin: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(u, 1, P, P) to add to scores: -inf where a token reads none of its row's, or a later one.

    A column of padding reads itself, so that it has something to read.

    Args:
        begin: (u, 1) the column of each prompt's first token.
        width: P.
        dtype: of the result.
    """
    column = torch.arange(width, device=begin.device)
    row = column.unsqueeze(1)
    unread = (column > row) | ((column < begin.unsqueeze(2)) & (column != row))
    bias = torch.zeros(len(begin), 1, width, -(-width // _ALIGNED) * _ALIGNED, dtype=dtype, device=begin.device)
    return bias[..., :width].masked_fill_(unread.unsqueeze(1), float("-inf"))


def _attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention of queries (u, P, heads, D) over keys and values (u, P, key heads, D) up to their own, (u * P, out)."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    grouped: dict[str, Any] = {"enable_gqa": True} if shared > 1 else {}
    if shared > 1 and (bias is not None or query.dtype == torch.float32):
        # Of torch's kernels only the one for half precision without a bias reads keys that heads share in place.
        key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
        grouped = {}
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=bias is None, scale=scale, **grouped
    )
    return attended.transpose(1, 2).reshape(-1, query.shape[1] * query.shape[3])
