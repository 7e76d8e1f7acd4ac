"""The decoding layer with fused kernels, for GPUs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlkit.generation.base import SamplingParams
from rlkit.generation.gpu.joined import Joined
from rlkit.generation.gpu.slots import Buffers, Rows
from rlkit.generation.llama import LlamaLayer, normalise
from rlkit.generation.sampling import sample
from rlkit.kernels import decoding as kernels
from rlkit.kernels.attention import attend_new_token
from rlkit.kernels.gates import silu_times

__all__ = ["FusedLayer", "add_and_normalise", "sample_fused", "take_in_fused"]


class FusedLayer(LlamaLayer):
    """As `LlamaLayer`, for slots; what surrounds a product is one kernel.

    Layers that read the same rows are one product: the model's parameters are moved side by side for that.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        attention, mlp = layer.self_attn, layer.mlp
        self.projections = Joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_and_up = Joined([mlp.gate_proj, mlp.up_proj])

    def attend_rows(
        self, normed: Tensor, cos: Tensor, sin: Tensor, stored: Tensor, rows: Rows, arrivals: Tensor
    ) -> Tensor:
        """(b, H) to (b, H); each row's key and value go to its place in `stored` (2, b, heads, W, D).

        `cos` and `sin` (positions, D) are tables; the sine has the sign of the rotated half. `arrivals` is what
        `attend_new_token` takes.
        """
        query, key, value = self.projected(normed, stored.shape[-1])
        where = rows.begin, rows.prompt_end, rows.source, rows.place
        scale = self.attention.scaling
        return self.out(attend_new_token(query, key, value, cos, sin, stored, *where, scale, arrivals))

    def projected(self, normed: Tensor, width: int) -> tuple[Tensor, ...]:
        """Queries (N, heads * D), keys and values (N, key heads * D) of tokens (N, H), not rotated; D is `width`."""
        query, key, value = self.projections(normed)
        if self.head_norms is not None:
            query, key = (
                normalise(norm, x.reshape(len(x), -1, width)).flatten(1)
                for norm, x in zip(self.head_norms, (query, key), strict=True)
            )
        return query, key, value

    def feed_forward(self, normed: Tensor) -> Tensor:
        gate, up = self.gate_and_up(normed)
        return self.down(silu_times(gate, up) if self.is_silu else self.activation(gate) * up)


def add_and_normalise(x: Tensor, y: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """x + y, and its RMS norm, in one kernel."""
    return kernels.add_rms_norm(x, y, norm.weight, norm.variance_epsilon)


def sample_fused(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """`rlkit.generation.sampling.sample`, reading all logits once and a block of them a second time."""
    if params.truncates:
        return sample(logits, params, uniforms)
    return kernels.draw_tokens(logits, 1.0 / params.temperature, uniforms)


def take_in_fused(buffers: Buffers, rows: Rows, tokens: Tensor, logprobs: Tensor, keeps: Tensor) -> None:
    """`rlkit.generation.gpu.slots.take_in`, in one kernel."""
    slots = rows.row, rows.place, rows.prompt_end, rows.tokens, rows.running
    kernels.take_in(tokens, logprobs, keeps, slots, (buffers.ids, buffers.logprobs, buffers.mask), buffers.limit)
