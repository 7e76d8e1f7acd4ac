"""The forward of one decoding step in buffers with fixed addresses, as a CUDA graph needs it.

For the Llama family it is written out, on a GPU with fused kernels. Other dense decoders run their own forward over the
same buffers, with attention that neither copies heads out nor asks the host anything.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache

from rlkit.engines.attention import attending_through
from rlkit.engines.families import is_one_of
from rlkit.engines.forward import bare_model, cache_argument, forward_arguments
from rlkit.generation.gpu.fused import FusedLayer
from rlkit.generation.gpu.fused import add_and_normalise as add_and_normalise_fused
from rlkit.generation.gpu.slots import Rows
from rlkit.generation.llama import (
    LlamaLayer,
    add_and_normalise,
    is_hooked,
    is_llama_like,
    normalise,
    norms_of,
    turns_of,
)
from rlkit.generation.skinny import SideBySide
from rlkit.kernels import available
from rlkit.kernels.attention import no_arrivals

__all__ = ["FusedStep", "ModelStep", "Step", "WrittenOutStep", "step_of", "suits_steps"]

_ATTENTION, _UNCAPPED = "rlkit_decoding", "rlkit_decoding_uncapped"
_FAMILIES = {
    f"{family}ForCausalLM" for family in ("Gemma", "Gemma2", "Gemma3", "Granite", "Mistral", "Olmo2", "Phi3", "SmolLM3")
}


class Step(Protocol):
    """Logits of the next token."""

    cache_shape: tuple[int, int, int]
    """Layers, key heads and head width of the cache."""
    reads_widths: bool
    """Whether all rows read as many columns of the cache as a call says; else each reads those that it has."""

    def __call__(self, rows: Rows, width: int) -> Tensor:
        """Takes in a token a row and stores its key and value.

        Args:
            rows: the slots that decode together.
            width: columns of the cache that reach beyond every row's place.

        Returns:
            (b, V) logits.
        """
        ...


def suits_steps(model: nn.Module) -> bool:
    """Whether `step_of` has a step for a model, computed as the model itself would."""
    if is_llama_like(model):
        return True
    bare: Any = bare_model(model)
    if not is_one_of(bare, _FAMILIES):
        return False
    if getattr(bare.config, "use_bidirectional_attention", False) or _turns_change(bare.config):
        return False
    return not is_hooked(bare) and cache_argument(bare) is not None


def _turns_change(config: Any) -> bool:
    """Whether rotations depend on the longest sequence of a batch, which rows beyond those that count would decide."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return any(kind.get("rope_type") in ("longrope", "dynamic") for kind in kinds)


def step_of(model: nn.Module) -> Step:
    """The step of a model for which `suits_steps` holds; it refers to the weights where they lie now."""
    bare: Any = bare_model(model)
    if not is_llama_like(model):
        return ModelStep(bare)
    fuses = available(bare.lm_head.weight.device) and not _turns_change(bare.config)
    return FusedStep(bare) if fuses else WrittenOutStep(bare)


class WrittenOutStep:
    """The Llama family."""

    reads_widths = True

    def __init__(self, model: Any, layers: type[LlamaLayer] = LlamaLayer) -> None:
        self.trunk = model.model
        self.layers: list[Any] = [layers(layer) for layer in self.trunk.layers]
        self.norms = norms_of(self.trunk)
        self.head = SideBySide([model.lm_head])
        self.cache_shape = _cache_shape(model.config)

    def __call__(self, rows: Rows, width: int) -> Tensor:
        x = self.trunk.embed_tokens(rows.tokens)
        cos, sin = turns_of(self.trunk, x, rows.position.unsqueeze(1))
        bias, stored = rows.bias(width), rows.stored[..., :width, :]
        normed = normalise(self.norms[0], x)
        for layer, own, after in zip(self.layers, stored, self.norms[1:], strict=True):
            x, normed = add_and_normalise(x, layer.attend(normed, cos, sin, own, bias, rows.place), layer.norm)
            x, normed = add_and_normalise(x, layer.feed_forward(normed), after)
        return self.head(normed)


class FusedStep(WrittenOutStep):
    """The same with fused kernels, which read of the cache what each row has."""

    reads_widths = False

    def __init__(self, model: Any) -> None:
        super().__init__(model, FusedLayer)
        self._turns: tuple[Tensor, Tensor] | None = None
        self._arrivals = no_arrivals(model.lm_head.weight.device)

    def __call__(self, rows: Rows, width: int) -> Tensor:
        x = self.trunk.embed_tokens(rows.tokens)
        cos, sin = self._turns_up_to(x, width)
        normed = normalise(self.norms[0], x)
        for layer, stored, after in zip(self.layers, rows.stored, self.norms[1:], strict=True):
            attended = layer.attend_rows(normed, cos, sin, stored, rows, self._arrivals)
            x, normed = add_and_normalise_fused(x, attended, layer.norm)
            x, normed = add_and_normalise_fused(x, layer.feed_forward(normed), after)
        return self.head(normed)

    def _turns_up_to(self, x: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        """Rotations (positions, D) of the first positions; kept, so that a graph reads them where they lie."""
        if self._turns is None or len(self._turns[0]) < positions:
            cos, sin = turns_of(self.trunk, x, torch.arange(positions, device=x.device).unsqueeze(0))
            self._turns = cos[0].contiguous(), sin[0].contiguous()
        return self._turns


class ModelStep:
    """A model's own forward; its layers may attend within a sliding window, and cap their scores."""

    reads_widths = True

    def __init__(self, model: Any) -> None:
        AttentionInterface.register(_ATTENTION, _attend)
        AttentionInterface.register(_UNCAPPED, partial(_attend, capped=False))
        self.model, config = model, model.config
        self.cache_argument = cache_argument(model) or ""
        self.one_logit = {"logits_to_keep": 1} if "logits_to_keep" in forward_arguments(model)[0] else {}
        self.cache_shape = _cache_shape(config)
        self.kinds = set(getattr(config, "layer_types", None) or ())
        self.window = getattr(config, "sliding_window", None)

    def __call__(self, rows: Rows, width: int) -> Tensor:
        config = self.model.config
        # Where the model itself attends through "sdpa", older versions of transformers leave the cap on scores out.
        name = _UNCAPPED if config._attn_implementation == "sdpa" else _ATTENTION
        with attending_through(config, name):
            output = self.model(
                rows.tokens.unsqueeze(1),
                position_ids=rows.position.unsqueeze(1),
                attention_mask=self._mask(rows.bias(width), rows.place),
                use_cache=True,
                **{self.cache_argument: _Stored(rows.stored[..., :width, :], rows.place)},
                **self.one_logit,
            )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _mask(self, bias: Tensor, place: Tensor) -> Tensor | dict[str, Tensor]:
        """What the model's forward takes as its mask; one for each kind of layer where there are several."""
        if self.window is None:
            return dict.fromkeys(self.kinds, bias) if len(self.kinds) > 1 else bias
        if self.kinds == {"full_attention"}:
            return bias
        columns = torch.arange(bias.shape[-1], device=bias.device)
        near = bias.masked_fill(columns <= place.view(-1, 1, 1, 1) - self.window, float("-inf"))
        return {"full_attention": bias, "sliding_attention": near} if self.kinds - {"sliding_attention"} else near


class _Stored(Cache):
    """Keys and values in buffers of the caller's, one column a row and step."""

    def __init__(self, stored: Tensor, place: Tensor) -> None:
        super().__init__(layers=[])
        self.stored, self.place = stored, place

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        keys, values = self.stored[layer_idx]
        row = torch.arange(len(keys), device=keys.device)
        keys[row, :, self.place] = key_states.squeeze(2)
        values[row, :, self.place] = value_states.squeeze(2)
        return keys, values


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    capped: bool = True,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one query a row: query (b, H, 1, D), key and value (b, K, W, D) -> (b, 1, H, D)."""
    if softcap is None or not capped:
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2), None
    heads, width = query.shape[1], query.shape[-1]
    by_key = query.view(len(query), key.shape[1], -1, width)
    scores = by_key @ key.transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
    shares = (softcap * torch.tanh(scores / softcap) + attention_mask).softmax(-1, dtype=torch.float32)
    return (shares.to(query.dtype) @ value).view(len(query), 1, heads, width), None


def _cache_shape(config: Any) -> tuple[int, int, int]:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, width
