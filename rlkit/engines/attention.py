"""Attention of a packed forward, put into `transformers` models for as long as such a forward lasts."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlkit.engines.forward import bare_model
from rlkit.engines.fused import fused_modules
from rlkit.engines.packing import Packed
from rlkit.utils import is_flash_attn_available

__all__ = ["attending_through", "current_layout", "packed_forward", "packs"]

_NAME = "rlkit_packed"
_HALF = (torch.bfloat16, torch.float16)
_layout: ContextVar[Packed] = ContextVar("layout of the packed forward that is running")
_switching = threading.RLock()


def packs(model: nn.Module) -> bool:
    """Whether a model's sequences can be laid end to end: it mixes tokens by plain causal attention alone.

    True for `transformers` decoders whose attention is exchangeable and full in every layer. Models with windows,
    soft-capped scores, convolutions or recurrent state are run padded; so are encoders, and models that compute
    activations again in transformers' own way, which would not find the layout then.
    """
    bare: Any = bare_model(model)
    config = getattr(bare, "config", None)
    if config is None or not getattr(bare, "_supports_attention_backend", False):
        return False
    config = config.get_text_config()
    if config is not bare.config or getattr(config, "attn_logit_softcapping", None):
        return False
    if getattr(config, "use_bidirectional_attention", False):
        return False
    for module in bare.modules():
        if getattr(module, "is_causal", True) is False or (
            module.training and getattr(module, "gradient_checkpointing", False)
        ):
            return False
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return not getattr(config, "sliding_window", None) and not getattr(config, "is_encoder_decoder", False)


@contextmanager
def attending_through(config: Any, name: str) -> Iterator[None]:
    """Within it, models of the config attend through a function registered with `transformers`. Threads take turns."""
    with _switching:
        before = config._attn_implementation
        config._attn_implementation = name
        try:
            yield
        finally:
            config._attn_implementation = before


@contextmanager
def packed_forward(model: nn.Module, layout: Packed, part: nn.Module | None = None) -> Iterator[None]:
    """Within it, the model's attention follows the layout, without dropout, and modules are fused where they can be.

    Args:
        model: its forward, or a part of it, runs within the block. Packed forwards of a process take turns.
        layout: of the tokens that it is given.
        part: the only part that runs, if not all of the model does.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    with attending_through(bare_model(model).config, _NAME), fused_modules(part or model):
        token = _layout.set(layout)
        try:
            yield
        finally:
            _layout.reset(token)


def current_layout() -> Packed | None:
    """The layout of the packed forward that is running in this thread, if one is."""
    return _layout.get(None)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # what comes before and after it can be compiled
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """What `transformers` calls in place of its own: query (1, H, N, D), key and value (1, K, N, D) -> (1, N, H, D)."""
    layout = _layout.get()
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, D)
    if layout.keys is not None:
        k, v = _Gathered.apply(k, layout.keys), _Gathered.apply(v, layout.keys)  # type: ignore[no-untyped-call]
    fused = _variable_length() if q.is_cuda and q.dtype in _HALF else None
    out = _padded(q, k, v, layout, scaling) if fused is None else fused(q, k, v, layout, scaling)
    return out.unsqueeze(0), None


class _Gathered(torch.autograd.Function):
    """x[index] for x (N, ...), with gradients of a row that was taken many times added up in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.rows, *grad.shape[1:], dtype=dtype, device=grad.device)
        return total.index_add_(0, index, grad.to(dtype)).to(grad.dtype), None


@cache
def _variable_length() -> Callable[[Tensor, Tensor, Tensor, Packed, float | None], Tensor] | None:
    """FlashAttention over segments of any length: the `flash-attn` package where it is installed, else torch's own."""
    if is_flash_attn_available():
        from flash_attn import flash_attn_varlen_func

        def by_package(q: Tensor, k: Tensor, v: Tensor, layout: Packed, scaling: float | None) -> Tensor:
            out: Tensor = flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q=layout.query_starts,
                cu_seqlens_k=layout.key_starts,
                max_seqlen_q=layout.longest_query,
                max_seqlen_k=layout.longest_key,
                softmax_scale=scaling,
                causal=True,
            )
            return out

        return by_package
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def by_torch(q: Tensor, k: Tensor, v: Tensor, layout: Packed, scaling: float | None) -> Tensor:
        out = varlen_attn(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            layout.query_starts,
            layout.key_starts,
            layout.longest_query,
            layout.longest_key,
            scale=scaling,
            window_size=(-1, 0),
            **grouped,
        )
        assert isinstance(out, Tensor)
        return out

    return by_torch


def _padded(q: Tensor, k: Tensor, v: Tensor, layout: Packed, scaling: float | None) -> Tensor:
    """The same on any device and in any dtype: attention alone runs padded, segment by segment."""
    queries, real = _table(layout.query_starts, layout.longest_query)
    keys, given = _table(layout.key_starts, layout.longest_key)
    # Query i of n stands at key m - n + i of m.
    shift = (layout.key_starts.diff() - layout.query_starts.diff()).unsqueeze(1)
    last = torch.arange(layout.longest_query, device=q.device) + shift
    mask = (torch.arange(layout.longest_key, device=q.device) <= last.unsqueeze(2)) & given.unsqueeze(1)
    mask = mask | ~real.unsqueeze(2)  # a row of padding attends to anything rather than to nothing
    out = scaled_dot_product_attention(
        q[queries].transpose(1, 2),
        k[keys].transpose(1, 2),
        v[keys].transpose(1, 2),
        attn_mask=mask.unsqueeze(1),
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)[real]


def _table(starts: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """(S, longest) places of each segment's tokens, 0 where it has none, and where it has some."""
    offsets = torch.arange(longest, device=starts.device)
    real = offsets < starts.diff().unsqueeze(1)
    return torch.where(real, starts[:-1].long().unsqueeze(1) + offsets, 0), real
