"""Sampling with the real vLLM, on a GPU or on the CPU; skipped where it is not installed (`make vllm` installs it)."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from rlkit.controllers.actor import ActorController
from rlkit.env import let_vllm_run_in_process
from rlkit.errors import GenerationError
from rlkit.generation.base import Generated, Generator, SamplingParams, Synced
from rlkit.generation.native import NativeGenerator
from rlkit.generation.vllm.generator import VllmGenerator
from rlkit.generation.weights import checkpoint_weights
from rlkit.trainers.grpo import GRPOTrainer
from tests.generation.models import rng, teacher_forced
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.toys import PROMPTS, good

let_vllm_run_in_process()
pytest.importorskip("vllm", reason="vLLM is not installed; `make vllm` runs these tests in an environment with it")

GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if GPU else "cpu"
MOST, MEAN = (3e-2, 3e-3) if GPU else (2e-5, 2e-5)
"""How far log-probs may be from those of a forward in fp32, at most and on average.

On a GPU vLLM's attention multiplies fp32 in TF32, with 10 bits of mantissa, so that a product is off by up to 2^-10 of
itself. Logits here reach about 10 and pass through two layers: 2^-10 * 10 * 2 = 0.02 in the worst case, and less on
average as errors cancel. Another distribution is another matter: with the weights of another seed the mean is above 1.
"""
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "engine_args": {"block_size": 16} if GPU else {},
}
BLOCK = 16 if GPU else 128
"""Tokens in one block of the prefix cache."""


def model_for_vllm(seed: int = 0, **changes: Any) -> Any:
    """A random Llama with heads of a width that vLLM's kernels have, and next tokens that differ clearly."""
    settings = {"initializer_range": 0.3, "head_dim": 64, "vocab_size": 64, "max_position_embeddings": 256}
    return tiny_model(seed, **{**settings, **changes}).to(DEVICE)


def move(model: Any, seed: int) -> None:
    """Other random weights, in place, as an optimizer would write them."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)


def batch(rows: int = 5, width: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts of lengths width, width - 1, ... padded on the left, on the device."""
    lengths = torch.tensor([max(1, width - row) for row in range(rows)])
    ids = torch.randint(3, 64, (rows, width), generator=rng(seed))
    mask = torch.arange(width) >= (width - lengths).unsqueeze(1)
    return ids.masked_fill(~mask, 2).to(DEVICE), mask.to(DEVICE)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Log-probs are those of the same distribution, within `MOST` and `MEAN`."""
    difference = (found - expected.to(found)).abs()
    assert difference.max() < MOST
    assert difference.mean() < MEAN


def greedy(generator: Generator, ids: Tensor, mask: Tensor, tokens: int = 12) -> Tensor:
    return generator.generate(ids, mask, SamplingParams(tokens, temperature=0.0), rng()).generated_ids


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, VllmGenerator]]:
    """A model and the generator that serves it; one engine for the module, since a process has one at a time."""
    model, generator = model_for_vllm(), VllmGenerator(OPTIONS, pad_token_id=2)
    generator.sync(model, 0)
    yield model, generator
    generator.release()


@pytest.fixture
def fresh(served: tuple[Any, VllmGenerator], request: pytest.FixtureRequest) -> tuple[Any, VllmGenerator]:
    """Both with the weights of seed 0."""
    model, generator = served
    model.load_state_dict(model_for_vllm().state_dict())
    generator.sync(model, request.node.name)
    return model, generator


def test_greedy_tokens_are_those_of_native_generation(fresh: tuple[Any, VllmGenerator]) -> None:
    model, generator = fresh
    assert isinstance(generator, Generator)
    ids, mask = batch()
    out = generator.generate(ids, mask, SamplingParams(12, temperature=0.0), rng())
    assert torch.equal(out.generated_ids, greedy(NativeGenerator(model), ids, mask))
    assert not out.rollout_logprobs.any()
    assert out.finish_reasons == ["length"] * 5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_teacher_forced_forward(fresh: tuple[Any, VllmGenerator], temperature: float) -> None:
    model, generator = fresh
    ids, mask = batch()
    out = generator.generate(ids, mask, SamplingParams(16, temperature=temperature), rng(1))
    expected = teacher_forced(model, mask, out, temperature)
    assert out.rollout_logprobs.dtype == torch.float32
    assert_close(out.rollout_logprobs, expected)
    with pytest.raises(AssertionError):  # another temperature is another distribution
        assert_close(out.rollout_logprobs, teacher_forced(model, mask, out, 1.1 * temperature))
    other = model_for_vllm(seed=1)
    assert (out.rollout_logprobs - teacher_forced(other, mask, out, temperature)).abs().mean() > 1
    assert len(set(out.generated_ids[:, 6:].flatten().tolist())) > 10


def test_truncated_logprobs_are_renormalised_over_the_kept_tokens(fresh: tuple[Any, VllmGenerator]) -> None:
    model, generator = fresh
    ids, mask = batch(rows=1)
    out = generator.generate(ids.repeat(64, 1), mask.repeat(64, 1), SamplingParams(1, 1.3, top_p=0.8, top_k=7), rng(2))
    with torch.no_grad():
        probs = (model(ids).logits[0, -1] / 1.3).softmax(-1)
    seven = probs.topk(7).values / probs.topk(7).values.sum()
    kept = int((seven.cumsum(0) < 0.8).sum()) + 1
    expected = dict(zip(probs.topk(kept).indices.tolist(), (seven / seven[:kept].sum()).log().tolist(), strict=False))
    drawn = out.generated_ids[:, -1].tolist()
    assert set(drawn) <= set(expected)
    assert len(set(drawn)) > 1
    for token, logprob in zip(drawn, out.rollout_logprobs[:, 0].tolist(), strict=True):
        assert logprob == pytest.approx(expected[token], abs=MOST)


def test_tokens_are_drawn_from_the_weights_of_the_last_sync(fresh: tuple[Any, VllmGenerator]) -> None:
    model, generator = fresh
    ids, mask = batch(rows=1)
    rows = 4000
    prompts = ids.repeat(rows, 1), mask.repeat(rows, 1)

    def statistic() -> float:
        """Pearson's chi-square of first tokens against the model's distribution, rare tokens (below 5) as one."""
        out = generator.generate(*prompts, SamplingParams(1, temperature=0.7), rng(5))
        with torch.no_grad():
            expected = (model(ids).logits[0, -1] / 0.7).softmax(-1).cpu().double() * rows
        seen = torch.bincount(out.generated_ids[:, -1].cpu(), minlength=64).double()
        rare = expected < 5
        expected = torch.cat([expected[~rare], expected[rare].sum().clamp_min(1).view(1)])
        seen = torch.cat([seen[~rare], seen[rare].sum().view(1)])
        degrees = len(expected) - 1
        return float(((seen - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)

    assert statistic() < 4  # standard deviations of a chi-square distribution
    move(model, seed=9)
    assert statistic() > 50  # the engine has the old weights still
    generator.sync(model, "moved")
    assert statistic() < 4


def test_the_prefix_cache_serves_prompts_and_is_empty_after_a_sync(fresh: tuple[Any, VllmGenerator]) -> None:
    model, generator = fresh
    ids = torch.randint(3, 64, (2, BLOCK + 8), generator=rng(3)).to(DEVICE)
    mask = torch.ones_like(ids).bool()
    assert generator._engine is not None
    engine, cached = generator._engine._llm.llm_engine, []
    step = engine.step

    def watched() -> Any:
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    engine.step = watched
    try:
        first = greedy(generator, ids, mask)
        again = greedy(generator, ids, mask)
        assert cached == [0, 0, BLOCK, BLOCK]
        assert torch.equal(first, again)
        move(model, seed=4)
        generator.sync(model, "moved")
        after = greedy(generator, ids, mask)
        assert cached[4:] == [0, 0]
    finally:
        engine.step = step
    assert torch.equal(after, greedy(NativeGenerator(model), ids, mask))
    assert not torch.equal(after, first)


def test_weights_move_once_a_version(fresh: tuple[Any, VllmGenerator]) -> None:
    model, generator = fresh
    assert generator.sync(model, "next").bytes == sum(4 * p.numel() for p in model.parameters())
    assert generator.sync(model, "next") == Synced(0, 0.0)
    assert generator.sync(model, "after").seconds > 0


def test_weights_go_directly_on_a_gpu_and_through_loaders_where_the_cpu_packs_them(
    fresh: tuple[Any, VllmGenerator],
) -> None:
    model, generator = fresh
    move(model, seed=2)
    generator.sync(model, "moved")
    assert generator.copied_directly is GPU


def unpacked(layer: Any, remove_weight: bool) -> None:
    """A layer of the CPU that multiplies with the weight it holds, as those of a GPU do."""
    layer.cpu_linear = torch.nn.functional.linear


@pytest.mark.parametrize("kind", ["llama, tied", "qwen2", "adapter"])
def test_later_weights_are_copied_directly(
    served: tuple[Any, VllmGenerator], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served[1].release()  # one engine at a time
    if not GPU:
        monkeypatch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", unpacked)
    model = {"llama, tied": lambda: model_for_vllm(vocab_size=70), "qwen2": lambda: qwen("qwen2"), "adapter": lora}[
        kind
    ]()
    generator, (ids, mask) = VllmGenerator(OPTIONS, pad_token_id=2), batch()
    seen, taken = [], []
    for version in range(4):
        taken.append(generator.sync(model, version).bytes)
        assert generator.copied_directly is (version > 0)
        seen.append(greedy(generator, ids, mask))
        assert torch.equal(seen[-1], greedy(NativeGenerator(model), ids, mask))
        move(model, seed=20 + version)
        for parameter in model.parameters() if version == 1 else ():
            parameter.data = parameter.data.clone()  # the trainer's memory is another from now on
    assert len(set(taken)) == 1
    assert all(not torch.equal(seen[0], later) for later in seen[1:])
    generator.release()


def lora() -> Any:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model_for_vllm(), config).eval()


def test_a_released_engine_leaves_nothing_behind(served: tuple[Any, VllmGenerator]) -> None:
    served[1].release()
    model, generator = model_for_vllm(), VllmGenerator(OPTIONS, pad_token_id=2)
    kept = torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
    before = torch.cuda.memory_allocated() if GPU else 0
    generator.sync(model, 0)
    ids, mask = batch()
    first = greedy(generator, ids, mask)
    generator.sync(model, 1)
    assert generator._engine is not None
    engine = generator._engine._llm.llm_engine
    worker = engine.model_executor.driver_worker.worker
    parts = [engine, engine.engine_core, worker, worker.model_runner, worker.weight_transfer_engine]
    tensors = [*worker.model_runner.model.parameters(), *worker.model_runner.model.buffers()]
    parts += [worker.model_runner.model, *tensors, *worker.model_runner.kv_caches]
    alive = [(type(part).__name__, weakref.ref(part)) for part in parts]
    assert len(alive) > 20
    del engine, worker, parts, tensors
    generator.release()
    assert [name for name, reference in alive if reference() is not None] == []
    if GPU:
        assert torch.cuda.memory_allocated() - before < 1 << 24
    assert kept == (torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision())
    generator.sync(model, 0)  # and another can be built
    assert torch.equal(greedy(generator, ids, mask), first)
    generator.release()


def test_a_stop_token_ends_its_row_and_belongs_to_it(fresh: tuple[Any, VllmGenerator]) -> None:
    model, generator = fresh
    ids, mask = batch()
    endless = greedy(NativeGenerator(model), ids, mask)[:, 6:].tolist()
    stop = endless[1][3]
    reported: list[tuple[list[int], Generated]] = []
    params = SamplingParams(12, temperature=0.0, stop_token_ids=(stop,))
    out = generator.generate(ids, mask, params, rng(), lambda rows, part: reported.append((rows, part)))
    native = NativeGenerator(model, 2).generate(ids, mask, params, rng())
    assert torch.equal(out.generated_ids, native.generated_ids)
    assert torch.equal(out.response_mask, native.response_mask)
    assert out.finish_reasons == native.finish_reasons
    assert out.finish_reasons[1] == "stop"
    assert out.generated_ids[1, 6 + endless[1].index(stop)] == stop
    assert sorted(row for rows, _ in reported for row in rows) == [0, 1, 2, 3, 4]
    for rows, part in reported:
        assert rows == sorted(rows)
        for name in ("generated_ids", "response_mask", "rollout_logprobs"):
            assert torch.equal(getattr(part, name), getattr(out.select(rows), name))


def test_the_same_random_state_gives_the_same_tokens(fresh: tuple[Any, VllmGenerator]) -> None:
    _, generator = fresh
    ids, mask = batch()
    ids, mask = ids[:1].repeat(4, 1), mask[:1].repeat(4, 1)
    before = torch.random.get_rng_state()
    state = rng(7)
    first, following, again, other = (
        generator.generate(ids, mask, SamplingParams(12), source).generated_ids
        for source in (state, state, rng(7), rng(8))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, following)
    assert not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) == 4  # rows of one prompt have seeds of their own
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_interrupt_leaves_no_request_behind(fresh: tuple[Any, VllmGenerator]) -> None:
    model, generator = fresh
    ids, mask = batch()

    def interrupt(rows: list[int], part: Generated) -> None:
        raise KeyboardInterrupt

    stop = int(greedy(NativeGenerator(model), ids, mask)[0, 6])
    with pytest.raises(KeyboardInterrupt):
        generator.generate(ids, mask, SamplingParams(12, temperature=0.0, stop_token_ids=(stop,)), rng(), interrupt)
    assert torch.equal(greedy(generator, ids, mask), greedy(NativeGenerator(model), ids, mask))


def test_what_does_not_fit_the_engine_is_refused(fresh: tuple[Any, VllmGenerator]) -> None:
    _, generator = fresh
    ids, mask = batch(width=250)
    with pytest.raises(GenerationError, match="more than the vLLM engine's context of 256"):
        generator.generate(ids, mask, SamplingParams(7), rng())
    generator.generate(ids, mask, SamplingParams(6), rng())
    with pytest.raises(GenerationError, match="not padded on the left"):
        generator.generate(ids, mask.flip(-1), SamplingParams(6), rng())


def test_a_merged_adapter_is_what_the_engine_samples_from(fresh: tuple[Any, VllmGenerator]) -> None:
    import peft

    base, generator = fresh
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(base), config).eval()
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    generator.sync(adapted, "adapted")
    ids, mask = batch()
    expected = greedy(NativeGenerator(adapted), ids, mask)
    assert torch.equal(greedy(generator, ids, mask), expected)
    assert not torch.equal(expected, greedy(NativeGenerator(base), ids, mask))
    after = adapted.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.skipif(not GPU, reason="vLLM sleeps on a GPU only")
def test_sleeping_frees_the_engine_and_a_sync_wakes_it(fresh: tuple[Any, VllmGenerator]) -> None:
    model, generator = fresh
    ids, mask = batch()
    before = torch.cuda.mem_get_info()[0]
    generator.sleep()
    assert torch.cuda.mem_get_info()[0] - before >= OPTIONS["kv_cache_memory_bytes"] // 2
    with pytest.raises(GenerationError, match="call sync"):
        generator.generate(ids, mask, SamplingParams(2), rng())
    assert generator.sync(model, "awake").bytes > 0
    assert torch.equal(greedy(generator, ids, mask), greedy(NativeGenerator(model), ids, mask))


@pytest.mark.skipif(GPU, reason="for the CPU, where vLLM cannot sleep")
def test_on_the_cpu_sleeping_changes_nothing(fresh: tuple[Any, VllmGenerator]) -> None:
    model, generator = fresh
    generator.sync(model, 5)
    generator.sleep()
    assert generator.sync(model, 5).bytes == 0


def qwen(kind: str) -> Any:
    torch.manual_seed(0)
    shape = {
        name: getattr(model_for_vllm().config, name) for name in ("hidden_size", "intermediate_size", "vocab_size")
    }
    heads = {"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "initializer_range": 0.3}
    config = {
        "qwen2": Qwen2Config(**shape | {"hidden_size": 64}, **heads, max_position_embeddings=256),
        "qwen3": Qwen3Config(**shape, **heads, head_dim=64, max_position_embeddings=256, tie_word_embeddings=True),
    }[kind]
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)  # they start at zero, where a forgotten one would not be noticed
    return model


def head_adapted() -> Any:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["lm_head", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model_for_vllm(), config).eval()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "an adapter on a tied head"])
def test_other_models_are_served_as_well(served: tuple[Any, VllmGenerator], kind: str) -> None:
    served[1].release()  # one engine at a time
    model = head_adapted() if kind.startswith("an adapter") else qwen(kind)
    generator = VllmGenerator(OPTIONS, pad_token_id=2)
    generator.sync(model, 0)
    ids, mask = batch()
    out = generator.generate(ids, mask, SamplingParams(12), rng(3))
    assert_close(out.rollout_logprobs, teacher_forced(model, mask, out))
    assert torch.equal(greedy(generator, ids, mask), greedy(NativeGenerator(model), ids, mask))
    generator.release()


def test_an_argument_that_vllm_does_not_know_is_its_error(served: tuple[Any, VllmGenerator]) -> None:
    served[1].release()
    generator = VllmGenerator({"engine_args": {"no_such_argument": 1}})
    with pytest.raises(GenerationError, match="cannot serve this model: .*no_such_argument"):
        generator.sync(model_for_vllm(), 0)
    with pytest.raises(GenerationError, match="rlkit sets load_format of vLLM itself"):
        VllmGenerator({"engine_args": {"load_format": "auto"}}).sync(model_for_vllm(), 0)


def grpo_with_vllm(**config: Any) -> GRPOTrainer:
    settings = {"batch_size": 16, "max_new_tokens": 6, "lr": 3e-3, "threads": 1, "use_vllm": True, "vllm": OPTIONS}
    settings["precision"] = "float32"  # a GPU's default is bfloat16
    actor = ActorController(model_for_vllm(max_position_embeddings=128), tiny_tokenizer())
    return GRPOTrainer(actor, good, prompts=PROMPTS, config={**settings, **config})


def test_a_grpo_step_moves_the_weights_and_records_their_version(served: tuple[Any, VllmGenerator]) -> None:
    served[1].release()  # one engine at a time
    trainer = grpo_with_vllm(ppo_epochs=2)  # with two, the trainer scores the responses in a pass of its own
    weights = sum(4 * tensor.numel() for _, tensor in checkpoint_weights(trainer.actor.model))
    before = copy.deepcopy(trainer.actor.model.state_dict())
    first = trainer.step()
    assert trainer.config.generation_engine == "vllm"
    assert first.rollouts["policy_version"] == [0] * 16
    assert first.metrics["sync/bytes"] == weights
    assert first.metrics["sync/seconds"] > 0
    assert first.metrics["rollout/logprob_gap_max"] < MOST
    assert trainer.actor.policy_version == 2
    moved = trainer.actor.model.state_dict()
    assert any(not torch.equal(before[name], moved[name]) for name in before)
    second = trainer.step()
    assert second.rollouts["policy_version"] == [2] * 16
    assert second.metrics["sync/bytes"] == weights
    assert second.metrics["rollout/logprob_gap_max"] < MOST

    trainer.load_state_dict(trainer.state_dict())  # weights of the same version may be others
    trainer.evaluate()
    assert trainer.actor.take_synced().bytes == weights
    trainer.evaluate()
    assert trainer.actor.take_synced().bytes == 0
    trainer.close()


def test_a_background_run_samples_with_an_engine_of_its_own(served: tuple[Any, VllmGenerator], tmp_path: Any) -> None:
    served[1].release()
    trainer = grpo_with_vllm()
    trainer.step()  # the engine of this process does not travel
    run = trainer.start(str(tmp_path / "run"), steps=2)
    run.wait(timeout=200)
    assert run.state == "finished", run.tail()
    assert run.rollouts["policy_version"].tolist() == [1] * 16 + [2] * 16
    trainer = run.load()
    assert trainer.actor.policy_version == 3
    assert trainer.step().rollouts["policy_version"] == [3] * 16
    trainer.close()
