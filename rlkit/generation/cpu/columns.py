"""The decoding step of the Llama family for fp32 on the CPU: one column a row of the batch, and few, large operations.

At this size a step spends a quarter of its time between the matrix products: in transposing their results, in
allocating, in making views, in operations of a few microseconds. Here results stay in the layout that the products
write, (features, B); products add to the residual stream themselves; the scale of the scores is in the rotation's
table; and every buffer and view that does not change from step to step is made once for a height of the batch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from rlkit.engines.forward import bare_model
from rlkit.generation.llama import LlamaDecoder, LlamaLayer, normalise
from rlkit.generation.skinny import SideBySide

__all__ = ["ColumnDecoder", "suits_columns"]

_FEW = 8
"""Below this many rows BLAS is four times faster when each row, and not each column, of the batch is contiguous."""


def suits_columns(model: nn.Module) -> bool:
    """True when every product of the model (one that `is_llama_like`) is a plain fp32 linear layer on the CPU."""
    bare: Any = bare_model(model)
    products = [bare.lm_head]
    for layer in bare.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        products += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    plain = all(type(product) is nn.Linear for product in products)
    return plain and all(p.dtype == torch.float32 and p.device.type == "cpu" for p in bare.parameters())


class ColumnDecoder(LlamaDecoder):
    """As `LlamaDecoder`, for models that `suits_columns`."""

    def __init__(self, model: nn.Module, cache_argument: str, capacity: int) -> None:
        super().__init__(model, cache_argument, capacity)
        self.norm_weights = [(norm.weight.detach().unsqueeze(-1), norm.variance_epsilon) for norm in self.norms]
        inner = (layer.norm for layer in self.layers)
        self.inner_weights = [(norm.weight.detach().unsqueeze(-1), norm.variance_epsilon) for norm in inner]
        self.space: _Space | None = None

    def step(self, tokens: Tensor) -> Tensor:
        rows, place = len(tokens), self.width
        if self.space is None or self.space.rows != rows:
            self.space = _Space(self.layers[0], self.head, rows, self.stored.shape[3])
        space = self.space
        embedded = self.trunk.embed_tokens(tokens)  # (B, H)
        cos, sin = self.trunk.rotary_emb(embedded, self.lengths)  # (B, 1, head width)
        space.x.copy_(embedded.t())
        space.turn(cos, sin, self.layers[0].attention.scaling)
        self.width += 1
        self.lengths = self.lengths + 1
        bias = self.bias[:, 0, :, : self.width].repeat_interleave(self.stored.shape[3], dim=0)  # (B * key heads, 1, W)
        together = self.stored.view(*self.stored.shape[:2], len(bias), self.capacity, -1)  # rows and heads in one
        flat = together[..., : self.width, :]  # (layers, 2, B * key heads, W, head width)
        keys, values = flat[:, 0].transpose(-1, -2).unbind(), flat[:, 1].unbind()
        places = self.stored[..., place, :].unbind()  # (2, B, key heads, head width) each
        space.normalise(*self.norm_weights[0])
        for i, layer in enumerate(self.layers):
            space.attend(layer, places[i], keys[i], values[i], bias)
            space.normalise(*self.inner_weights[i])
            space.feed_forward(layer)
            space.normalise(*self.norm_weights[i + 1])
        space.multiply(self.head, space.to_logits, space.logits)
        return space.logits.t().contiguous()


_Views = list[tuple[Tensor, Tensor]]
"""For each batched product of a `SideBySide`: the columns once a block (n, in, B), and its outputs (n, rows, B)."""


class _Space:
    """Buffers of one height of the batch, and their views; they serve every layer."""

    def __init__(self, layer: LlamaLayer, head: SideBySide, rows: int, key_heads: int) -> None:
        self.rows, self.key_heads = rows, key_heads
        query_key_value, out, gate_up, down = layer.query_key_value, layer.out, layer.gate_up, layer.down
        heads, hidden, inner = (sum(product.heights) for product in (query_key_value, out, gate_up))
        head_dim = layer.attention.head_dim
        self.x = torch.empty(hidden, rows)  # the residual stream
        self.squares = torch.empty(hidden, rows)
        self.normed = _columns(hidden, rows)
        self.heads = torch.empty(heads, rows)  # queries, then keys, then values
        self.by_row = self.heads.view(-1, head_dim, rows).permute(2, 0, 1)  # (B, heads, head width)
        self.turned = torch.empty(self.by_row.shape)
        self.cos, self.sin = torch.ones_like(self.turned), torch.zeros_like(self.turned)
        self.half = head_dim // 2
        self.query = self.turned[:, : -2 * key_heads].view(rows, key_heads, -1, head_dim)  # (B, key heads, G, D)
        self.key_value = self.turned[:, -2 * key_heads :].view(rows, 2, key_heads, -1).transpose(0, 1)
        self.attended = torch.empty(rows * key_heads, self.query.shape[2], head_dim)
        self.gate_up = torch.empty(inner, rows)
        self.gate, self.up = self.gate_up.chunk(2)
        self.gated = _columns(inner // 2, rows)
        self.logits = torch.empty(sum(head.heights), rows)
        self.to_heads = _views(query_key_value, self.normed, self.heads)
        self.to_out = _views(out, self.attended.view(rows, -1).t(), self.x)
        self.to_gate_up = _views(gate_up, self.normed, self.gate_up)
        self.to_down = _views(down, self.gated, self.x)
        self.to_logits = _views(head, self.normed, self.logits)

    def turn(self, cos: Tensor, sin: Tensor, scale: float) -> None:
        """Write the rotation's table: queries also get the scale of the scores, values stay as they are."""
        queries, values = slice(-2 * self.key_heads), slice(-2 * self.key_heads, -self.key_heads)
        signed = torch.cat([-sin[..., : self.half], sin[..., self.half :]], dim=-1)
        for table, angle in ((self.cos, cos), (self.sin, signed)):
            table[:, queries] = angle * scale
            table[:, values] = angle

    def normalise(self, weight: Tensor, epsilon: float) -> None:
        """RMS norm of x, into `normed`; weight (H, 1)."""
        torch.mul(self.x, self.x, out=self.squares)
        power = self.squares.sum(0).div_(len(self.x)).add_(epsilon)
        torch.mul(self.x, power.rsqrt_(), out=self.normed).mul_(weight)

    def attend(self, layer: LlamaLayer, place: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> None:
        """Add a layer's attention to x.

        Args:
            layer: whose weights to use.
            place: (2, B, key heads, D), where the new key and value go.
            keys: (B * key heads, D, W), with that place.
            values: (B * key heads, W, D), with that place.
            bias: (B * key heads, 1, W), added to the scores.
        """
        self.multiply(layer.query_key_value, self.to_heads, self.heads)
        by_row = self.by_row
        if layer.head_norms is not None:
            query, key, value = by_row.tensor_split((-2 * self.key_heads, -self.key_heads), dim=1)
            by_row = torch.cat([normalise(layer.head_norms[0], query), normalise(layer.head_norms[1], key), value], 1)
        half = self.half
        torch.mul(by_row, self.cos, out=self.turned)
        self.turned[..., :half].addcmul_(by_row[..., half:], self.sin[..., :half])
        self.turned[..., half:].addcmul_(by_row[..., :half], self.sin[..., half:])
        place.copy_(self.key_value)
        scores = torch.baddbmm(bias, self.query.reshape(len(bias), -1, 2 * half), keys)
        torch.bmm(scores.softmax(-1), values, out=self.attended)
        self.add(layer.out, self.to_out)

    def feed_forward(self, layer: LlamaLayer) -> None:
        """Add a layer's MLP to x."""
        self.multiply(layer.gate_up, self.to_gate_up, self.gate_up)
        gate = silu(self.gate, inplace=True) if layer.is_silu else layer.activation(self.gate)
        torch.mul(gate, self.up, out=self.gated)
        self.add(layer.down, self.to_down)

    def multiply(self, product: SideBySide, views: _Views, out: Tensor) -> None:
        """Write a product into `out`, of which `views` are views."""
        for blocks, (columns, part) in zip(product.blocks, views, strict=True):
            torch.bmm(blocks, columns, out=part)
        if product.bias is not None:
            out.add_(product.bias.unsqueeze(-1))

    def add(self, product: SideBySide, views: _Views) -> None:
        """Add a product to x, of which `views` are views."""
        for blocks, (columns, part) in zip(product.blocks, views, strict=True):
            part.baddbmm_(blocks, columns)
        if product.bias is not None:
            self.x.add_(product.bias.unsqueeze(-1))


def _columns(height: int, rows: int) -> Tensor:
    """An empty (height, rows), laid out for being multiplied."""
    return torch.empty(rows, height).t() if rows < _FEW else torch.empty(height, rows)


def _views(product: SideBySide, columns: Tensor, out: Tensor) -> _Views:
    parts = torch.split(out, product.heights)
    return [
        (columns.expand(len(blocks), -1, -1), part.view(len(blocks), blocks.shape[1], -1))
        for blocks, part in zip(product.blocks, parts, strict=True)
    ]
