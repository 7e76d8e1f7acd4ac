"""Prompts taken in by fused kernels, beside the model's own forward: logits, and what lies in the cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from rlkit.engines.forward import bare_model, cache_argument
from rlkit.generation.base import Generated, SamplingParams
from rlkit.generation.gpu import graphed
from rlkit.generation.gpu.graphed import GraphedDecoder
from rlkit.generation.gpu.prefill import FusedPrefill, ModelPrefill, Prefill, _bias, prefill_of
from rlkit.generation.gpu.steps import step_of
from tests.generation.models import family_model
from tests.kernels.device import CLOSE, DEVICE, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("_no_gradients")]

SLOTS, CAPACITY = 5, 16
MASKS = {"whole": [[1, 1, 1, 1]] * 2, "padded": [[0, 0, 0, 1], [0, 1, 1, 1]]}


@pytest.fixture
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def prompts(mask: list[list[int]], seed: int = 0) -> tuple[Tensor, Tensor]:
    given = torch.tensor(mask, dtype=torch.bool)
    ids = torch.randint(3, 48, given.shape, generator=torch.Generator().manual_seed(seed))
    return ids.masked_fill(~given, 2).to(DEVICE), given.to(DEVICE)


def own_forward(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (u, V) of the next token, and keys and values (layers, 2, u, key heads, P, D), by the model itself."""
    cache: Any = DynamicCache()
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    model = bare_model(model)
    caching = {cache_argument(model) or "": cache}
    logits = model(ids, attention_mask=mask, position_ids=positions, **caching).logits
    return logits[:, -1], torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])


def check(
    model: Any, prefill: FusedPrefill, ids: Tensor, mask: Tensor, reference: Any = None, bound: float = 1e-5
) -> None:
    """Three rows of two prompts, in slots that are out of order; the others keep what they have.

    Differences count relative to the largest value there is.
    """
    wanted, kept = own_forward(reference or model, ids, mask)
    layers, key_heads, head_width = prefill.step.cache_shape
    dtype = next(model.parameters()).dtype
    stored = torch.full((layers, 2, SLOTS, key_heads, CAPACITY, head_width), 7.0, dtype=dtype, device=DEVICE)
    slots, row_of = torch.tensor([3, 0, 4], device=DEVICE), torch.tensor([1, 0, 0], device=DEVICE)
    logits = prefill(ids, mask, not bool(mask.all()), stored, slots, row_of)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.to(wanted), wanted, rtol=0, atol=bound * float(wanted.abs().max()))
    width = ids.shape[1]
    for slot, row in zip(slots.tolist(), row_of.tolist(), strict=True):
        found = stored[:, :, slot, :, :width][..., mask[row], :].to(wanted)
        own = kept[:, :, row][..., mask[row], :]
        torch.testing.assert_close(found, own, rtol=0, atol=bound * float(own.abs().max()))
    assert (stored[..., width:, :] == 7.0).all()
    assert (stored[:, :, [1, 2]] == 7.0).all()


def prefill_for(model: Any) -> FusedPrefill:
    prefill = prefill_of(model, cache_argument(model) or "", step_of(model))
    assert isinstance(prefill, FusedPrefill)
    return prefill


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("family", ["llama", "llama-biased", "llama-long", "mistral", "qwen2", "qwen3"])
def test_it_computes_what_the_model_computes(family: str, mask: list[list[int]]) -> None:
    model = family_model(family).to(DEVICE)
    check(model, prefill_for(model), *prompts(mask))


@pytest.mark.parametrize("dtype", [dtype for dtype in CLOSE if dtype != torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
def test_half_precision_is_near_full_precision(dtype: torch.dtype, mask: list[list[int]]) -> None:
    model = family_model("qwen3").to(DEVICE, dtype)
    check(model, prefill_for(model), *prompts(mask), copy.deepcopy(model).float(), CLOSE[dtype])


def test_calls_may_have_prompts_of_other_widths_and_see_weights_as_they_are() -> None:
    model = family_model("qwen2").to(DEVICE)
    prefill = prefill_for(model)
    for width in (3, 9, 1):
        check(model, prefill, *prompts([[1] * width] * 2, seed=width))
        for parameter in model.parameters():
            parameter.mul_(0.9)


def test_adapters_are_called_and_their_layers_not_joined() -> None:
    peft = pytest.importorskip("peft")
    base = family_model("qwen2").to(DEVICE)
    plain = copy.deepcopy(base)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config).eval()
    prefill = prefill_for(model)
    ids, mask = prompts(MASKS["whole"])
    check(model, prefill, ids, mask)
    with model.disable_adapter():
        check(model, prefill, ids, mask, plain)


def test_padding_is_not_read_and_reads_itself() -> None:
    found = _bias(torch.tensor([[2], [0]], device=DEVICE), 3, torch.float16)
    reads = [[[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    wanted = torch.tensor(reads, dtype=torch.float16, device=DEVICE).log().unsqueeze(1)
    assert torch.equal(found, wanted)


class _Waiting(TorchDispatchMode):
    """Collects operations whose results the host has to know."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
def test_the_host_waits_for_nothing(mask: list[list[int]]) -> None:
    model = family_model("llama").to(DEVICE)
    ids, given = prompts(mask)
    stored, slots = torch.zeros(2, 2, 2, 2, CAPACITY, 8, device=DEVICE), torch.arange(2, device=DEVICE)
    seen = []
    for prefill in (prefill_for(model), ModelPrefill(model, cache_argument(model) or "")):
        with _Waiting() as waiting:
            prefill(ids, given, True, stored, slots, slots)
        seen.append(waiting.seen)
    assert seen[0] == []
    assert seen[1]  # transformers looks at the mask


def test_rows_that_wait_begin_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than slots, so that rows begin beside running ones; against prompts through the model's own forward."""
    for name in ("LOOK_EVERY", "ROW_STEP", "LEAD"):
        monkeypatch.setattr(graphed, name, 2)
    model = family_model("qwen2").to(DEVICE)
    ids, mask = (part.repeat_interleave(2, 0) for part in prompts(MASKS["whole"]))
    uniforms = torch.rand(4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(DEVICE)
    decoder = GraphedDecoder(model, cache_argument(model) or "", 2, graphs=False, slots=2)
    fused, begun = decoder._admission.prefill, []
    assert isinstance(fused, FusedPrefill)

    def generate(prefill: Prefill) -> Generated:
        def watched(*arguments: Any) -> Tensor:
            begun.append(len(arguments[-1]))
            return prefill(*arguments)

        decoder._admission.prefill = watched
        return decoder.generate(ids, mask, SamplingParams(4, stop_token_ids=tuple(range(2, 10))), uniforms)

    made = generate(fused)
    assert sum(begun) == 4
    assert len(begun) > 1, "no row waited"
    wanted = generate(ModelPrefill(model, decoder.cache_argument))
    assert torch.equal(made.generated_ids, wanted.generated_ids)
    assert torch.equal(made.response_mask, wanted.response_mask)
    torch.testing.assert_close(made.rollout_logprobs, wanted.rollout_logprobs, rtol=1e-4, atol=1e-5)
