"""Decoding against transformers' own, against a second forward, against itself along other paths, and after updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlkit.engines.forward import cache_argument
from rlkit.engines.logprobs import response_scores
from rlkit.generation import native
from rlkit.generation.base import Generated, SamplingParams
from rlkit.generation.cpu.columns import ColumnDecoder
from rlkit.generation.cpu.compiled import CompiledDecoder, suits_compiled
from rlkit.generation.decoders import CachedDecoder, UncachedDecoder
from rlkit.generation.llama import LlamaDecoder
from rlkit.generation.native import NativeGenerator, decoder_for
from tests.generation.models import (
    CONFIGS,
    WRITTEN_OUT,
    Recurrent,
    WithoutCache,
    family_model,
    prompts,
    rng,
    teacher_forced,
)
from tests.tiny import tiny_model


def decode_with(decoder: Any, model: nn.Module, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> Generated:
    """Generate along one path, whichever the model would take by itself."""
    cache = cache_argument(model) or ""
    made: dict[Any, Any] = {
        UncachedDecoder: lambda model, capacity: UncachedDecoder(model),
        CachedDecoder: lambda model, capacity: CachedDecoder(model, cache),
        LlamaDecoder: lambda model, capacity: LlamaDecoder(model, cache, capacity),
        ColumnDecoder: lambda model, capacity: ColumnDecoder(model, cache, capacity),
        CompiledDecoder: lambda model, capacity: CompiledDecoder(model, cache, capacity),
    }
    with monkeypatch.context() as patch:
        patch.setattr(native, "decoder_for", made[decoder])
        return NativeGenerator(model).generate(*prompts(11), params, rng(3))


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_equals_transformers_generate(family: str) -> None:
    model = family_model(family)
    ids, mask = prompts()
    params = SamplingParams(12, temperature=0, stop_token_ids=(2,))
    out = NativeGenerator(model).generate(ids, mask, params, rng())
    reference = model.generate(ids, attention_mask=mask.long(), do_sample=False, max_new_tokens=12)[:, 6:]
    lengths = [int(row.sum()) for row in out.response_mask]
    assert max(lengths) == reference.shape[1]
    for row, length in enumerate(lengths):
        assert out.generated_ids[row, 6 : 6 + length].tolist() == reference[row, :length].tolist()
        assert set(reference[row, length:].tolist()) <= {2}
    assert torch.equal(out.generated_ids[:, :6], ids)
    assert len({tuple(row.tolist()) for row in reference}) > 1  # the prompts matter


@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_equal_a_teacher_forced_forward(family: str) -> None:
    model = family_model(family)
    ids, mask = prompts()
    params = SamplingParams(12, temperature=0.6, stop_token_ids=(2, 3, 4))
    out = NativeGenerator(model).generate(ids, mask, params, rng(1))
    scored = teacher_forced(model, mask, out, 0.6)
    torch.testing.assert_close(out.rollout_logprobs, scored, atol=1e-4, rtol=0)
    ratio = (scored - out.rollout_logprobs)[out.response_mask].exp().mean()
    assert ratio.item() == pytest.approx(1, abs=0.01)


def test_each_family_takes_the_path_meant_for_it() -> None:
    taken = {name: type(decoder_for(family_model(name), 8)).__name__ for name in CONFIGS}
    written_out = (
        "CompiledDecoder" if suits_compiled(family_model("llama")) else "ColumnDecoder"
    )  # with numba or without
    assert taken == {name: written_out if name in WRITTEN_OUT else "CachedDecoder" for name in CONFIGS}
    assert type(decoder_for(family_model("llama").bfloat16(), 8)) is LlamaDecoder
    assert isinstance(decoder_for(Recurrent(), 8), UncachedDecoder)


@pytest.mark.parametrize("family", [*WRITTEN_OUT, "gpt2", "mistral-window"])
def test_all_paths_agree_while_rows_finish(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model(family)
    params = SamplingParams(10, stop_token_ids=tuple(range(2, 8)))
    paths = [UncachedDecoder, CachedDecoder, *([LlamaDecoder, ColumnDecoder] if family in WRITTEN_OUT else [])]
    paths += [CompiledDecoder] if family in WRITTEN_OUT and suits_compiled(model) else []
    first, *others = [decode_with(path, model, params, monkeypatch) for path in paths]
    assert len(set(first.response_mask.sum(-1).tolist())) > 1  # rows did finish at different times
    for other in others:
        assert torch.equal(other.generated_ids, first.generated_ids)
        assert torch.equal(other.response_mask, first.response_mask)
        assert other.finish_reasons == first.finish_reasons
        torch.testing.assert_close(other.rollout_logprobs, first.rollout_logprobs, atol=2e-5, rtol=0)


def test_a_forward_hook_or_another_class_is_not_passed_over() -> None:
    hooked = tiny_model()
    hooked.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)

    class Changed(type(tiny_model())):  # type: ignore[misc]
        """A user's own variant, whose step may be anything."""

    changed = Changed(tiny_model().config).eval()
    for model in (hooked, changed):
        assert type(decoder_for(model, 8)) is CachedDecoder


@pytest.mark.parametrize("model", [Recurrent(), WithoutCache()], ids=["recurrent", "wrapped"])
def test_a_plain_module_works_through_the_path_without_cache(model: nn.Module) -> None:
    ids, mask = prompts()
    params = SamplingParams(8, stop_token_ids=(2, 3))
    out = NativeGenerator(model).generate(ids, mask, params, rng(1))
    torch.testing.assert_close(out.rollout_logprobs, teacher_forced(model, mask, out), atol=1e-5, rtol=0)


def test_a_plain_module_samples_what_the_cached_model_samples() -> None:
    ids, mask = prompts()
    params = SamplingParams(8, stop_token_ids=(2, 3))
    plain = NativeGenerator(WithoutCache(), pad_token_id=2).generate(ids, mask, params, rng(1))
    cached = NativeGenerator(tiny_model()).generate(ids, mask, params, rng(1))
    assert torch.equal(plain.generated_ids, cached.generated_ids)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("extra", [1, 6])
def test_more_left_padding_changes_nothing(family: str, extra: int) -> None:
    model = family_model(family)
    ids, mask = prompts()
    wide_ids = torch.cat([torch.full((5, extra), 7), ids], dim=1)
    wide_mask = torch.cat([torch.zeros(5, extra, dtype=torch.bool), mask], dim=1)
    params = SamplingParams(8, stop_token_ids=(2, 3))
    narrow = NativeGenerator(model).generate(ids, mask, params, rng(4))
    wide = NativeGenerator(model).generate(wide_ids, wide_mask, params, rng(4))
    assert torch.equal(wide.generated_ids[:, extra:], narrow.generated_ids)
    torch.testing.assert_close(wide.rollout_logprobs, narrow.rollout_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("update", ["in place", "load_state_dict", "data replaced"])
def test_the_next_call_uses_the_new_weights(update: str) -> None:
    model, other = tiny_model(0), tiny_model(1)
    generator = NativeGenerator(model)
    params = SamplingParams(8)
    ids, mask = prompts()
    before = generator.generate(ids, mask, params, rng(1))
    if update == "in place":
        with torch.no_grad():
            for old, new in zip(model.parameters(), other.parameters(), strict=True):
                old.copy_(new)
    elif update == "load_state_dict":
        model.load_state_dict(other.state_dict())
    else:
        for old, new in zip(model.parameters(), other.parameters(), strict=True):
            old.data = new.data.clone()
    after = generator.generate(ids, mask, params, rng(1))
    assert generator.model is model
    assert not torch.equal(after.generated_ids, before.generated_ids)
    torch.testing.assert_close(after.rollout_logprobs, teacher_forced(model, mask, after), atol=1e-5, rtol=0)
    fresh = NativeGenerator(other).generate(ids, mask, params, rng(1))
    assert torch.equal(after.generated_ids, fresh.generated_ids)
    assert torch.equal(after.rollout_logprobs, fresh.rollout_logprobs)


def test_an_optimizer_step_is_seen_and_no_copy_of_the_weights_is_kept() -> None:
    model = tiny_model()
    generator = NativeGenerator(model)
    ids, mask = prompts()
    generator.generate(ids, mask, SamplingParams(4), rng())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    out = generator.generate(ids, mask, SamplingParams(4), rng())
    full = torch.cat([mask, out.response_mask], dim=1)
    response_scores(model, out.generated_ids, full, 6).logprobs.sum().backward()
    optimizer.step()
    after = generator.generate(ids, mask, SamplingParams(4), rng())
    torch.testing.assert_close(after.rollout_logprobs, teacher_forced(model, mask, after), atol=1e-5, rtol=0)
    assert set(vars(generator)) == {"model", "pad_token_id", "_graphed"}
    assert generator._graphed is None


def test_adapters_sample_with_the_adapter_and_without_it_when_disabled() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model()
    params = SamplingParams(8, temperature=0)
    plain = NativeGenerator(base).generate(*prompts(), params, rng())
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    generator = NativeGenerator(model)
    ids, mask = prompts()
    adapted = generator.generate(ids, mask, SamplingParams(8), rng())
    torch.testing.assert_close(adapted.rollout_logprobs, teacher_forced(model, mask, adapted), atol=1e-5, rtol=0)
    assert isinstance(decoder_for(model, 8), LlamaDecoder)
    with model.disable_adapter():
        off = generator.generate(ids, mask, params, rng())
    assert torch.equal(off.generated_ids, plain.generated_ids)
    assert not torch.equal(generator.generate(ids, mask, params, rng()).generated_ids, plain.generated_ids)


def test_prompt_learning_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="prompt-learning adapter"):
        NativeGenerator(model)


def test_half_precision_keeps_float32_log_probs() -> None:
    model = tiny_model().bfloat16()
    ids, mask = prompts()
    out = NativeGenerator(model).generate(ids, mask, SamplingParams(6), rng())
    assert out.rollout_logprobs.dtype == torch.float32
    torch.testing.assert_close(out.rollout_logprobs, teacher_forced(model, mask, out), atol=0.05, rtol=0)
