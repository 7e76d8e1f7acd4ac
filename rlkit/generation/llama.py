"""One decoding step of the Llama family, written out for small batches: a few large operations and no bookkeeping.

The weights are those of the model's own modules, read at every step; nothing is copied or fused ahead of time, so there
is nothing to refresh after an update. What makes it fast: keys and values go into one tensor allocated up front, the
attention mask is built once, every product of a weight and a few rows is laid out the way BLAS handles best, and heads
that share keys are not copied out.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlkit.engines.forward import bare_model
from rlkit.generation.decoders import CachedDecoder

__all__ = ["LlamaDecoder", "is_llama_like", "skinny_linear"]

_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_PANEL = 1024
"""Rows of a weight multiplied at a time on the CPU: about 2 MB of weight, which stays in cache while it is packed."""


def is_llama_like(model: nn.Module) -> bool:
    """True when `LlamaDecoder` computes what this model computes.

    That is for the unchanged transformers classes of the family with full attention in every layer, no forward hooks
    and no weights moved in at run time (offloading). Linear layers may be replaced (adapters): they are called.
    """
    bare: Any = bare_model(model)
    kind = type(bare)
    if kind.__name__ not in _FAMILY or not kind.__module__.startswith("transformers.models."):
        return False
    config = bare.config
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = getattr(config, "sliding_window", None) is not None and kind.__name__ == "MistralForCausalLM"
    hooked = any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in bare.modules())
    return set(layer_types) == {"full_attention"} and not windowed and not hooked


def skinny_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """`layer(x)` for a few rows x (B, in) -> (B, out), a transposed view of an (out, B) tensor on the CPU.

    BLAS multiplies a large weight with few columns faster than few rows with a large transposed weight (1.2 to 2
    times at 4 to 16 rows of fp32), and panels of the weight that fit in cache faster than the whole.
    """
    if type(layer) is not nn.Linear or x.device.type != "cpu":
        return layer(x)  # type: ignore[no-any-return]
    weight, columns = layer.weight, x.t()
    product = x.new_empty(weight.shape[0], x.shape[0])
    for panel, rows in zip(torch.split(weight, _PANEL), torch.split(product, _PANEL), strict=True):
        torch.mm(panel, columns, out=rows)
    return product.t() if layer.bias is None else product.t().add_(layer.bias)


class LlamaDecoder(CachedDecoder):
    """Prefill through the model's own forward, then steps written out here."""

    def __init__(self, model: nn.Module, cache_argument: str, capacity: int) -> None:
        super().__init__(model, cache_argument)
        self.capacity = capacity
        self.trunk = self.model.model
        self.layers = list(self.trunk.layers)
        self.attentions = [layer.self_attn for layer in self.layers]
        self.head_dim = self.attentions[0].head_dim
        self.width = 0  # columns of the cache that are in use

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = super().prefill(input_ids, attention_mask)
        rows, self.width = input_ids.shape
        first = self.cache.layers[0].keys
        shape = (len(self.layers), 2, rows, first.shape[1], self.capacity, self.head_dim)
        self.stored = first.new_empty(shape)  # (layers, keys and values, B, key heads, capacity, head width)
        for stored, layer in zip(self.stored, self.cache.layers, strict=True):
            stored[0, :, :, : self.width] = layer.keys
            stored[1, :, :, : self.width] = layer.values
            layer.reset()
        self.lengths = attention_mask.sum(-1, keepdim=True)  # (B, 1) attended tokens, the next token's position
        self.bias = first.new_zeros(rows, 1, 1, self.capacity)  # added to attention scores: -inf at left padding
        self.bias[:, 0, 0, : self.width].masked_fill_(~attention_mask, float("-inf"))
        return logits

    def select(self, rows: Tensor) -> None:
        self.stored = self.stored[:, :, rows]
        self.lengths, self.bias = self.lengths[rows], self.bias[rows]

    def step(self, tokens: Tensor) -> Tensor:
        x = self.trunk.embed_tokens(tokens)  # (B, H)
        cos, sin = self.trunk.rotary_emb(x, self.lengths)  # (B, 1, head width)
        half = self.head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)  # sign of the rotated half, once for all layers
        self.width += 1
        self.lengths = self.lengths + 1
        bias = self.bias[..., : self.width]
        for layer, attention, stored in zip(self.layers, self.attentions, self.stored, strict=True):
            x = x + self._attend(attention, layer.input_layernorm(x), cos, sin, stored[..., : self.width, :], bias)
            x = x + self._mlp(layer.mlp, layer.post_attention_layernorm(x))
        return skinny_linear(self.model.lm_head, self.trunk.norm(x))

    def _attend(self, attention: Any, x: Tensor, cos: Tensor, sin: Tensor, stored: Tensor, bias: Tensor) -> Tensor:
        """Attention of one new token per row; its key and value go into the last column of `stored`."""
        heads = (len(x), -1, self.head_dim)
        query = skinny_linear(attention.q_proj, x).reshape(heads)  # (B, heads, head width)
        key = skinny_linear(attention.k_proj, x).reshape(heads)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        keys, values = stored
        keys[:, :, -1] = _rotate(key, cos, sin)
        values[:, :, -1] = skinny_linear(attention.v_proj, x).reshape(heads)
        grouped = _rotate(query, cos, sin).view(len(x), keys.shape[1], -1, self.head_dim)  # queries that share a key
        mixed = scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=attention.scaling)
        return skinny_linear(attention.o_proj, mixed.reshape(len(x), -1))

    @staticmethod
    def _mlp(mlp: Any, x: Tensor) -> Tensor:
        gated = mlp.act_fn(skinny_linear(mlp.gate_proj, x)) * skinny_linear(mlp.up_proj, x)
        return skinny_linear(mlp.down_proj, gated)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, heads, head width); the first half of `sin` comes negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
