"""One decoding step of the Llama family, written out for small batches: a few large operations and no bookkeeping.

The weights are those of the model's own modules; nothing is copied or fused ahead of time, so there is nothing to
refresh after an update. What makes it fast: keys and values go into one tensor allocated up front, the attention mask
is built once, products of a weight and a few rows are laid out the way BLAS handles best (`skinny`), and heads that
share keys are not copied out.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from rlkit.engines.families import gates_by_silu, is_one_of
from rlkit.engines.forward import bare_model
from rlkit.generation.decoders import CachedDecoder
from rlkit.generation.skinny import SideBySide

__all__ = [
    "LlamaDecoder",
    "LlamaLayer",
    "add_and_normalise",
    "is_hooked",
    "is_llama_like",
    "moved_out",
    "normalise",
    "norms_of",
    "turns_of",
]

_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def is_llama_like(model: nn.Module) -> bool:
    """True when `LlamaDecoder` computes what this model computes.

    That is for the unchanged transformers classes of the family with full attention in every layer, no forward hooks
    and no weights moved in at run time (offloading). Linear layers may be replaced (adapters): they are called.
    """
    bare: Any = bare_model(model)
    if not is_one_of(bare, _FAMILY):
        return False
    config = bare.config
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = getattr(config, "sliding_window", None) is not None and is_one_of(bare, ["MistralForCausalLM"])
    return set(layer_types) == {"full_attention"} and not windowed and not is_hooked(bare)


def is_hooked(model: nn.Module) -> bool:
    """Whether something runs before or after a module's forward that a forward written out would leave out."""
    return any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in model.modules())


class LlamaDecoder(CachedDecoder):
    """Prefill through the model's own forward, then steps written out here."""

    def __init__(self, model: nn.Module, cache_argument: str, capacity: int) -> None:
        super().__init__(model, cache_argument)
        self.capacity = capacity
        self.trunk = self.model.model
        self.layers = [LlamaLayer(layer) for layer in self.trunk.layers]
        self.norms = norms_of(self.trunk)
        self.head = SideBySide([self.model.lm_head])
        self.width = 0  # columns of the cache that are in use

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = super().prefill(input_ids, attention_mask)
        rows, self.width = input_ids.shape
        self.stored = moved_out(self.cache, self.capacity)
        self.lengths = attention_mask.sum(-1, keepdim=True)  # (B, 1) attended tokens, the next token's position
        self.bias = self.stored.new_zeros(rows, 1, 1, self.capacity)  # added to attention scores: -inf at left padding
        self.bias[:, 0, 0, : self.width].masked_fill_(~attention_mask, float("-inf"))
        return logits

    def select(self, rows: Tensor) -> None:
        self.stored = self.stored[:, :, rows]
        self.lengths, self.bias = self.lengths[rows], self.bias[rows]

    def step(self, tokens: Tensor) -> Tensor:
        x = self.trunk.embed_tokens(tokens)  # (B, H)
        cos, sin = turns_of(self.trunk, x, self.lengths)  # (B, 1, head width)
        self.width += 1
        self.lengths = self.lengths + 1
        bias = self.bias[..., : self.width]
        normed = normalise(self.norms[0], x)
        for layer, stored, after in zip(self.layers, self.stored[..., : self.width, :], self.norms[1:], strict=True):
            x, normed = add_and_normalise(x, layer.attend(normed, cos, sin, stored, bias), layer.norm)
            x, normed = add_and_normalise(x, layer.feed_forward(normed), after)
        return self.head(normed).contiguous()


class LlamaLayer:
    """One decoder layer for one new token per row."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.activation = attention, mlp.act_fn
        self.is_silu = gates_by_silu(mlp)
        self.norm = layer.post_attention_layernorm
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.query_key_value = SideBySide([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = SideBySide([attention.o_proj])
        self.gate_up = SideBySide([mlp.gate_proj, mlp.up_proj])
        self.down = SideBySide([mlp.down_proj])

    def attend(
        self, normed: Tensor, cos: Tensor, sin: Tensor, stored: Tensor, bias: Tensor, place: Tensor | None = None
    ) -> Tensor:
        """(B, H) to (B, H); the token's key and value go into a column of `stored` (2, B, heads, W, D).

        That is the column `place` (B,) int64, or the last one. `sin` has the sign of the rotated half.
        """
        rows, key_heads, head_dim = len(normed), stored.shape[2], stored.shape[-1]
        heads = self.query_key_value(normed).view(rows, -1, head_dim)  # queries, then keys, then values
        rotating, value = heads[:, :-key_heads], heads[:, -key_heads:]
        if self.head_norms is not None:
            query, key = rotating[:, :-key_heads], rotating[:, -key_heads:]
            rotating = torch.cat([normalise(self.head_norms[0], query), normalise(self.head_norms[1], key)], dim=1)
        rotated = torch.addcmul(rotating * cos, rotating.roll(head_dim // 2, dims=-1), sin)
        keys, values = stored
        if place is None:
            keys[:, :, -1] = rotated[:, -key_heads:]
            values[:, :, -1] = value
        else:
            row = torch.arange(rows, device=place.device)
            keys[row, :, place] = rotated[:, -key_heads:]
            values[row, :, place] = value
        return self.out(attention_over(rotated[:, :-key_heads], keys, values, bias, self.attention.scaling))

    def feed_forward(self, normed: Tensor) -> Tensor:
        """(B, H) to (B, H)."""
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


def moved_out(cache: Any, capacity: int) -> Tensor:
    """Empties a transformers cache into one tensor (layers, keys and values, B, key heads, capacity, head width)."""
    rows, key_heads, width, head_dim = cache.layers[0].keys.shape
    moved: Tensor = cache.layers[0].keys.new_empty(len(cache.layers), 2, rows, key_heads, capacity, head_dim)
    for stored, layer in zip(moved, cache.layers, strict=True):
        stored[0, :, :, :width] = layer.keys
        stored[1, :, :, :width] = layer.values
        layer.reset()
    return moved


def attention_over(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention of one query a row (B, heads, D) over keys and values (B, key heads, W, D), to (B, heads * D)."""
    rows, key_heads, head_dim = len(query), keys.shape[1], keys.shape[-1]
    if query.is_cuda:
        attended = scaled_dot_product_attention(
            query.unsqueeze(2), keys, values, attn_mask=bias, scale=scale, enable_gqa=True
        )
        return attended.reshape(rows, -1)
    # On the CPU two batched products take half the time of the attention kernel for one query. Queries are grouped by
    # the key they share.
    grouped = query.contiguous().view(rows, key_heads, -1, head_dim)
    scores = torch.bmm(grouped.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)).view(*grouped.shape[:3], -1)
    shares = scores.mul_(scale).add_(bias).softmax(-1)
    return torch.bmm(shares.flatten(0, 1), values.flatten(0, 1)).view(rows, -1)


def add_and_normalise(x: Tensor, y: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """x + y, and its RMS norm."""
    total = x + y
    return total, normalise(norm, total)


def norms_of(trunk: Any) -> list[Any]:
    """The norm before each layer, and the one after the last."""
    return [*(layer.input_layernorm for layer in trunk.layers), trunk.norm]


def turns_of(trunk: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B, T, D) at positions (B, T), in the dtype of x; the sine has the sign of the rotated half."""
    cos, sin = trunk.rotary_emb(x, positions)
    half = cos.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def normalise(norm: Any, x: Tensor) -> Tensor:
    """RMS norm by a module's weight and epsilon, in one operation."""
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
