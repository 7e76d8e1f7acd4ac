"""Decoding of the Llama family in fp32 on the CPU through one compiled function a step (needs numba)."""

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines.families import gates_by_silu
from rlkit.engines.forward import bare_model
from rlkit.generation.cpu.columns import suits_columns
from rlkit.generation.decoders import CachedDecoder
from rlkit.generation.llama import moved_out

__all__ = ["CompiledDecoder", "suits_compiled"]

_FEW_TOKENS = 128
"""Up to this many prompt tokens a prefill goes through the same function; for more, BLAS is faster."""


@cache
def _kernels() -> Any:
    """The module of compiled functions; None where numba is not installed or does not fit numpy."""
    if os.name != "posix":  # the threads give way to one another through a function of POSIX
        return None
    try:
        return importlib.import_module("rlkit.generation.cpu.kernels")
    except ImportError:
        return None


def suits_compiled(model: nn.Module) -> bool:
    """True when `CompiledDecoder` can decode with a model (one that `is_llama_like`), and numba is there."""
    if not suits_columns(model):
        return False
    bare: Any = bare_model(model)
    silu = all(gates_by_silu(layer.mlp) for layer in bare.model.layers)
    return silu and all(p.is_contiguous() for p in bare.parameters()) and _kernels() is not None


class CompiledDecoder(CachedDecoder):
    """For models that `suits_compiled`. After a short prompt, a row's logits do not depend on the other rows."""

    def __init__(self, model: nn.Module, cache_argument: str, capacity: int) -> None:
        super().__init__(model, cache_argument)
        self.kernels, self.weights, self.capacity = _kernels(), _Weights(self.model), capacity
        self.threads = torch.get_num_threads()
        self.pool = ThreadPoolExecutor(self.threads - 1) if self.threads > 1 else None
        self.space: _Space | None = None

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        rows, self.width = input_ids.shape  # the width is that of the cache in use
        self.lengths = attention_mask.sum(-1)  # (B,) attended tokens, the next token's position
        self.first = self.width - self.lengths  # (B,) place of a row's first token
        if self.lengths.sum() > _FEW_TOKENS:
            logits = super().prefill(input_ids, attention_mask)
            self.stored = moved_out(self.cache, self.capacity)
            return logits
        shape = self.weights.shape
        self.stored = torch.empty(shape["layers"], 2, rows, shape["key heads"], self.capacity, shape["head width"])
        ends = self.lengths.cumsum(0)
        spans = torch.stack([ends - self.lengths, ends, self.first, self.first], dim=1)
        positions = attention_mask.nonzero()[:, 1] - self.first.repeat_interleave(self.lengths)
        return self._logits(input_ids[attention_mask], positions, spans)

    def select(self, rows: Tensor) -> None:
        self.stored = self.stored.index_select(2, rows)
        self.lengths, self.first = self.lengths[rows], self.first[rows]

    def step(self, tokens: Tensor) -> Tensor:
        columns = torch.arange(len(tokens))
        place = torch.full_like(columns, self.width)
        spans = torch.stack([columns, columns + 1, place, self.first], dim=1)
        logits = self._logits(tokens, self.lengths, spans)
        self.width += 1
        self.lengths = self.lengths + 1
        return logits

    def _logits(self, tokens: Tensor, positions: Tensor, spans: Tensor) -> Tensor:
        """Logits (sequences, V) after the last of each sequence's tokens.

        Args:
            tokens: (columns,) int64, sequence after sequence.
            positions: (columns,) int64.
            spans: (sequences, 4) int64, see `rlkit.generation.cpu.kernels`.
        """
        used, columns = len(tokens), (len(tokens) + 7) // 8 * 8
        if self.space is None or self.space.columns != columns:
            self.space = _Space(self.weights.shape, columns, self.capacity, self.threads, self.kernels)
        space, shape = self.space, self.weights.shape
        embedded = self.model.model.embed_tokens(tokens)  # (columns, H)
        cos, sin = self.model.model.rotary_emb(embedded, positions.unsqueeze(0))  # (1, columns, head width)
        space.x[:, :used] = embedded.t()
        space.x[:, used:] = 0
        logits = torch.empty(len(spans), shape["vocabulary"])
        sizes = {**shape, "sequences": len(spans), "columns": columns}
        tensors = (
            self.weights.addresses, self.weights.floats, spans, space.x, cos[0].contiguous(), sin[0].contiguous(),
            space.heads, space.attended, space.gated, space.private, self.stored, space.work.zero_(), logits,
        )  # fmt: skip
        arrays = [tensor.numpy() for tensor in tensors]
        self._together([(i, tuple(sizes[name] for name in self.kernels.SHARED), *arrays) for i in range(self.threads)])
        return logits

    def _together(self, calls: list[tuple[Any, ...]]) -> None:
        """One call of the compiled function a thread; the first is this thread's, which waits for nobody to start."""
        helpers = [] if self.pool is None else [self.pool.submit(self.kernels.forward, *call) for call in calls[1:]]
        try:
            self.kernels.forward(*calls[0])
        finally:
            for helper in helpers:
                if not helper.cancel():
                    helper.result()


class _Weights:
    """Where a model's weights lie, and its shape."""

    def __init__(self, model: Any) -> None:
        trunk, config = model.model, model.config
        attention = trunk.layers[0].self_attn
        width = attention.head_dim
        self.shape = {
            "layers": len(trunk.layers),
            "hidden": config.hidden_size,
            "inner": trunk.layers[0].mlp.gate_proj.out_features,
            "heads": attention.q_proj.out_features // width,
            "key heads": attention.k_proj.out_features // width,
            "head width": width,
            "vocabulary": model.lm_head.out_features,
        }
        self.zeros = torch.zeros(max(product.out_features for product in model.modules() if type(product) is nn.Linear))
        self.kept: list[Tensor] = []  # so that what an address points to stays
        rows, floats = [], []
        for layer in trunk.layers:
            attention, mlp = layer.self_attn, layer.mlp
            products = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
            products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            inner = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else [None, None]
            norms = [layer.input_layernorm, layer.post_attention_layernorm, *inner]
            rows.append(self._row(products, norms))
            floats.append([*(norm.variance_epsilon if norm else 0.0 for norm in norms), attention.scaling])
        rows.append(self._row([model.lm_head] + [None] * 6, [trunk.norm] + [None] * 3))
        floats.append([trunk.norm.variance_epsilon, 0.0, 0.0, 0.0, 0.0])
        self.addresses = torch.tensor(rows)  # (layers + 1, 18)
        self.floats = torch.tensor(floats)  # (layers + 1, 5)

    def _row(self, products: list[Any], norms: list[Any]) -> list[int]:
        weights = [0 if product is None else self._address(product.weight) for product in products]
        biases = [
            self._address(self.zeros if product is None or product.bias is None else product.bias)
            for product in products
        ]
        return weights + biases + [0 if norm is None else self._address(norm.weight) for norm in norms]

    def _address(self, tensor: Tensor) -> int:
        self.kept.append(tensor.detach())
        return tensor.data_ptr()


class _Space:
    """Buffers for one number of columns; they serve every layer."""

    def __init__(self, shape: dict[str, int], columns: int, capacity: int, threads: int, kernels: Any) -> None:
        self.columns = columns
        hidden, width = shape["hidden"], shape["head width"]
        self.x = torch.empty(hidden, columns)
        self.heads = torch.empty((shape["heads"] + 2 * shape["key heads"]) * width, columns)
        self.attended = torch.zeros(shape["heads"] * width, columns)
        self.gated = torch.empty(shape["inner"], columns)
        self.private = torch.empty(threads, kernels.private_size(hidden, width, columns, capacity))
        self.work = torch.empty(shape["layers"] * kernels.PHASES + 1, 16, dtype=torch.long)
