"""Fused attention over segments on a GPU, against the same attention padded, and against float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, BertConfig

from rlkit.engines import attention
from rlkit.engines.packing import pack
from tests.engines.test_logprobs import batch, groups
from tests.generation.models import family_model

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gradients(
    run: object, layout: attention.Packed, dtype: torch.dtype, heads: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output (N, H, 64) and gradients of random queries, keys and values."""
    rng = torch.Generator().manual_seed(0)
    keys = len(layout.ids) if layout.keys is None else len(layout.keys)
    sizes = ((len(layout.ids), heads[0]), (keys, heads[1]), (keys, heads[1]))
    q, k, v = (torch.randn(*size, 64, generator=rng).to("cuda", dtype).requires_grad_() for size in sizes)
    out: Tensor = run(q, k, v, layout, None)  # type: ignore[operator]
    out.backward(torch.randn(out.shape, generator=rng).to("cuda", dtype))
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


@needs_gpu
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["all heads", "grouped heads"])
@pytest.mark.parametrize("rows", [groups(0), batch(2, 3)], ids=["groups", "no groups"])
def test_segments_of_any_length_attend_as_padded_ones_do(
    heads: tuple[int, int], rows: tuple[Tensor, Tensor, int]
) -> None:
    """bf16 has 8 bits: against float32 the fused kernel errs as little as the padded one in bf16, within 2%."""
    ids, mask, width = rows
    layout = pack(ids.cuda(), mask.cuda(), width)
    fused = attention._variable_length()
    assert fused is not None, "neither flash-attn nor torch.nn.attention.varlen is there"
    exact = gradients(attention._padded, layout, torch.float32, heads)
    for one, other in zip(gradients(fused, layout, torch.bfloat16, heads), exact, strict=True):
        error = (one.float() - other).norm() / other.norm()
        assert float(error) < 0.02


def test_gradients_of_rows_taken_many_times_add_up() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 1, 0, 3, 0, 1])
    weights = torch.randn(6, 3, dtype=torch.float64)
    taken: Tensor = attention._Gathered.apply(x, index)  # type: ignore[no-untyped-call]
    assert torch.equal(taken, x[index])
    (taken * weights).sum().backward()
    expected = torch.stack([weights[[0, 2, 4]].sum(0), weights[[1, 5]].sum(0), torch.zeros(3), weights[3]])
    torch.testing.assert_close(x.grad, expected)


def test_encoders_and_models_that_checkpoint_their_own_way_run_padded() -> None:
    assert not attention.packs(AutoModel.from_config(BertConfig(hidden_size=32, num_attention_heads=4, vocab_size=48)))
    model = family_model("llama")
    assert attention.packs(model.train())
    model.gradient_checkpointing_enable()
    assert not attention.packs(model)
    assert attention.packs(model.eval())  # then nothing is computed again
