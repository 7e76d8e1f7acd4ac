"""What rlkit asks of vLLM and makes of its answers, against an engine with vLLM's names. Needs no vLLM."""

from __future__ import annotations

import gc
import json
import pickle
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlkit.config import TrainerConfig
from rlkit.config_vllm import VllmConfig
from rlkit.errors import ConfigError, GenerationError
from rlkit.generation.base import Generated, Generator, SamplingParams, Synced
from rlkit.generation.choice import generator_for
from rlkit.generation.native import NativeGenerator
from rlkit.generation.vllm import generator as vllm_generator
from rlkit.generation.vllm.generator import VllmGenerator
from rlkit.generation.vllm.versions import Engine
from rlkit.trainers.from_names import RLTrainer
from tests.generation.models import Recurrent, prompts, rng
from tests.generators import WithoutWeights
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.toys import good, grpo


class FakeLLM:
    """Answers with the prompt's last token plus 1, 2, ... until a stop id; a longer prompt takes longer to begin."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.pushed: list[dict[str, Tensor]] = []
        self.waiting: dict[str, tuple[int, list[int], Any]] = {}
        self.counter, self.clock, self.reason = 10, 0, "length"
        self.salts: list[str] = []
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=32),
            step=self.step,
            has_unfinished_requests=lambda: bool(self.waiting),
            abort_request=lambda names: self.calls.append(("abort", names)),
        )

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        assert request == {"init_info": {}}
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        self.pushed.append(dict(request["update_info"]["weights"]))
        self.calls.append("update")

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))

    def enqueue(self, asked: list[dict[str, Any]], params: list[Any], use_tqdm: bool) -> list[str]:
        assert not use_tqdm
        names = []
        for prompt, wanted in zip(asked, params, strict=True):
            self.salts.append(str(prompt["cache_salt"]))
            self.waiting[str(self.counter)] = (
                self.clock + len(prompt["prompt_token_ids"]),
                prompt["prompt_token_ids"],
                wanted,
            )
            names.append(f"{self.counter}-a1b2c3d4")
            self.counter += 1
        return names

    def step(self) -> list[Any]:
        self.clock += 1
        done = [name for name, (due, _, _) in self.waiting.items() if due <= self.clock]
        return [self.answer(name) for name in reversed(done)]

    def answer(self, name: str) -> Any:
        _, prompt, params = self.waiting.pop(name)
        tokens = [prompt[-1] + i for i in range(1, params.max_tokens + 1)]
        stops = [i for i, token in enumerate(tokens) if token in params.stop_token_ids]
        reason = "stop" if stops else self.reason
        tokens = tokens[: stops[0] + 1] if stops else tokens
        flat = None if params.logprobs is None else SimpleNamespace(logprobs=[-token / 8 for token in tokens])
        completion = SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=reason)
        return SimpleNamespace(request_id=name, finished=True, outputs=[completion])


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """A fake in place of the engine that a generator would build; it can sleep."""
    fake = FakeLLM()
    module = SimpleNamespace(SamplingParams=lambda **kwargs: SimpleNamespace(**kwargs))

    def open_engine(folder: Path, device: torch.device, *, sleep: bool, arguments: dict[str, Any]) -> Engine:
        fake.calls.append(("open", json.loads((folder / "config.json").read_text()), device, arguments))
        return Engine(fake, module, can_sleep=sleep, own_group=False)

    monkeypatch.setattr(vllm_generator, "open_engine", open_engine)
    return fake


def named(llm: FakeLLM) -> list[Any]:
    return [call if isinstance(call, str) else call[0] for call in llm.calls]


def test_responses_come_back_in_the_order_of_the_rows(llm: FakeLLM) -> None:
    generator = VllmGenerator(pad_token_id=2)
    generator.sync(tiny_model(), 0)
    ids = torch.tensor([[3, 4, 20], [2, 2, 10], [2, 6, 30], [2, 2, 40]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1], [0, 0, 1]])
    told: list[tuple[list[int], Generated]] = []
    params = SamplingParams(3, stop_token_ids=(12, 31))
    out = generator.generate(ids, mask, params, rng(), lambda rows, part: told.append((rows, part)))
    assert out.generated_ids.tolist() == [
        [3, 4, 20, 21, 22, 23],
        [2, 2, 10, 11, 12, 2],
        [2, 6, 30, 31, 2, 2],
        [2, 2, 40, 41, 42, 43],
    ]
    assert out.response_mask.tolist() == [[True] * 3, [True, True, False], [True, False, False], [True] * 3]
    assert out.rollout_logprobs[1].tolist() == [-11 / 8, -12 / 8, 0.0]
    assert out.finish_reasons == ["length", "stop", "stop", "length"]
    assert [rows for rows, _ in told] == [[1, 3], [2], [0]]
    assert told[1][1].generated_ids.tolist() == [[2, 6, 30, 31]]


def test_seeds_come_from_the_random_state_and_greedy_asks_for_no_logprobs(llm: FakeLLM) -> None:
    generator = VllmGenerator()
    generator.sync(tiny_model(), 0)
    asked: list[Any] = []
    enqueue = llm.enqueue
    llm.enqueue = lambda ids, params, use_tqdm: (asked.append(params), enqueue(ids, params, use_tqdm))[1]  # type: ignore[method-assign]
    state = rng(1)
    for source in (state, state, rng(1)):
        generator.generate(*prompts(), SamplingParams(2, 0.5, top_p=0.9, top_k=4), source)
    out = generator.generate(*prompts(), SamplingParams(2, 0.0, top_p=0.9, top_k=4), rng())
    seeds = [[params.seed for params in call] for call in asked]
    assert seeds[0] == seeds[2] != seeds[1]
    assert len(set(seeds[0])) == 5
    sampled, greedy = asked[0][0], asked[3][0]
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.logprobs) == (0.5, 0.9, 4, 0)
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.logprobs) == (0.0, 1.0, 0, None)
    assert sampled.ignore_eos
    assert not sampled.detokenize
    assert not out.rollout_logprobs.any()


def test_weights_move_when_the_version_changes_and_after_sleep(llm: FakeLLM) -> None:
    model, generator = tiny_model(), VllmGenerator()
    push = ["start", "update", "finish"]
    first = generator.sync(model, 0)
    assert named(llm) == ["open", "init", *push]
    assert first.bytes == sum(4 * p.numel() for p in model.parameters())
    assert generator.sync(model, 0) == Synced()
    assert generator.sync(model, 1).bytes == first.bytes
    assert set(llm.pushed[-1]) == set(model.state_dict()) - {"lm_head.weight"}
    llm.calls.clear()
    generator.sleep()
    generator.sleep()
    with pytest.raises(GenerationError, match=r"call sync\(model, version\) before generate"):
        generator.generate(*prompts(), SamplingParams(2), rng())
    assert generator.sync(model, 1).bytes == first.bytes
    assert llm.calls == [("sleep", 2), ("wake", "weights"), *push, ("wake", "kv_cache")]


def test_cached_prefixes_belong_to_one_push(llm: FakeLLM) -> None:
    model, generator = tiny_model(), VllmGenerator()
    for version in (0, 0, 1):
        generator.sync(model, version)
        generator.generate(*prompts(rows=2, width=3), SamplingParams(2), rng())
    assert llm.salts == ["1", "1", "1", "1", "2", "2"]


def test_weights_do_not_change_under_running_requests(llm: FakeLLM) -> None:
    model, generator = tiny_model(), VllmGenerator()
    generator.sync(model, 0)
    llm.waiting["7"] = (100, [3], None)
    llm.calls.clear()
    with pytest.raises(GenerationError, match="cannot change while it still works on requests"):
        generator.sync(model, 1)
    assert llm.calls == []
    llm.waiting.clear()
    assert generator.sync(model, 1).bytes > 0  # the failed push left the weights as old ones


def test_a_released_engine_refers_to_no_model(llm: FakeLLM) -> None:
    generator = VllmGenerator()
    model = tiny_model()
    generator.sync(model, 0)
    llm.pushed.clear()
    gone = weakref.ref(model)
    generator.release()
    del model
    gc.collect()
    assert gone() is None
    generator.release()


def test_the_engine_is_built_from_the_model_and_the_settings(llm: FakeLLM) -> None:
    generator = VllmGenerator({"enforce_eager": True, "engine_args": {"block_size": 16}}, context=24)
    generator.sync(tiny_model().to(torch.bfloat16), 0)
    _, config, device, arguments = llm.calls[0]
    assert (config["architectures"], config["model_type"], config["tie_word_embeddings"]) == (
        ["LlamaForCausalLM"],
        "llama",
        True,
    )
    assert config["num_key_value_heads"] == 2
    assert device == torch.device("cpu")
    assert arguments == {
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.3,
        "max_model_len": 24,
        "enforce_eager": True,
        "block_size": 16,
    }


def test_an_adapter_on_a_tied_head_gives_the_engine_a_head_of_its_own(llm: FakeLLM) -> None:
    import peft

    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    VllmGenerator().sync(model, 0)
    assert llm.calls[0][1]["tie_word_embeddings"] is False
    assert "lm_head.weight" in llm.pushed[0]


def test_what_vllm_cannot_do_is_refused(llm: FakeLLM) -> None:
    generator = VllmGenerator()
    generator.sync(tiny_model(), 0)
    ids, mask = prompts()
    with pytest.raises(GenerationError, match=r"temperature is 0\.005, and vLLM samples at 0\.01 or above"):
        generator.generate(ids, mask, SamplingParams(2, temperature=0.005), rng())
    with pytest.raises(GenerationError, match="6 tokens and max_new_tokens is 27, .* the vLLM engine's context of 32"):
        generator.generate(ids, mask, SamplingParams(27), rng())
    with pytest.raises(GenerationError, match="not padded on the left"):
        generator.generate(ids, mask.flip(-1), SamplingParams(2), rng())
    llm.reason = "abort"
    with pytest.raises(GenerationError, match="ended the response to row 4 with 'abort'"):
        generator.generate(ids, mask, SamplingParams(2), rng())
    with pytest.raises(GenerationError, match="Recurrent has none"):
        VllmGenerator().sync(Recurrent(), 0)


def test_an_interrupt_withdraws_what_is_still_asked(llm: FakeLLM) -> None:
    generator = VllmGenerator()
    generator.sync(tiny_model(), 0)

    def interrupt(rows: list[int], part: Generated) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(*prompts(rows=3, width=3), SamplingParams(2), rng(), interrupt)
    assert llm.calls[-1] == ("abort", ["10", "11"])


def test_an_engine_stays_in_its_process(llm: FakeLLM) -> None:
    generator = VllmGenerator({"enforce_eager": True}, pad_token_id=7, context=30)
    generator.sync(tiny_model(), 3)
    there = pickle.loads(pickle.dumps(generator))
    assert (there.options, there.pad_token_id, there.context) == (generator.options, 7, 30)
    llm.calls.clear()
    assert there.sync(tiny_model(), 3).bytes > 0
    assert named(llm)[0] == "open"


def test_without_vllm_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(GenerationError, match=r"pip install 'rlkit-lab\[gpu\]', or take generation='native'"):
        VllmGenerator().sync(tiny_model(), 0)


def test_use_vllm_is_another_name_for_the_choice() -> None:
    assert TrainerConfig().generation_engine == "native"
    assert TrainerConfig(use_vllm=True).generation_engine == "vllm"
    assert TrainerConfig(generation="vllm").generation_engine == "vllm"
    assert TrainerConfig(use_vllm=False).generation_engine == "native"
    assert TrainerConfig(use_vllm=True, generation="vllm").replace_live({"lr": 1e-3}).generation_engine == "vllm"
    with pytest.raises(ConfigError, match="use_vllm=True and generation='native' contradict each other"):
        TrainerConfig(use_vllm=True, generation="native")
    with pytest.raises(ConfigError, match="use_vllm=False and generation='vllm' contradict each other"):
        TrainerConfig(use_vllm=False, generation="vllm")
    with pytest.raises(ConfigError, match="'trtllm' is none of 'native', 'vllm'"):
        TrainerConfig(generation="trtllm")  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [None, {"lr": 1e-5}, TrainerConfig(lr=1e-5), {"use_vllm": True}])
def test_a_trainer_from_names_takes_the_choice_as_an_argument(config: Any, llm: FakeLLM, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    given = {"actor_model": str(tmp_path), "reward_model": good, "prompts": ["the film"]}
    trainer = RLTrainer(**given, config=config, use_vllm=True)
    assert isinstance(trainer.actor.generator, VllmGenerator)
    assert llm.calls == []  # nothing is built before it is needed
    for contradiction in ({"generation": "native"}, TrainerConfig(use_vllm=False)):
        with pytest.raises(ConfigError, match="contradict each other"):
            RLTrainer(**given, config=contradiction, use_vllm=True)


def test_settings_of_the_engine_are_strict() -> None:
    config = TrainerConfig.from_dict({"use_vllm": True, "vllm": {"gpu_memory_utilization": 0.5}})
    assert config.vllm == VllmConfig(gpu_memory_utilization=0.5)
    assert TrainerConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="unknown VllmConfig key 'gpu_memory_utilisation'; did you mean"):
        TrainerConfig.from_dict({"use_vllm": True, "vllm": {"gpu_memory_utilisation": 0.5}})
    with pytest.raises(ConfigError, match="is above its greatest value 1"):
        VllmConfig(gpu_memory_utilization=1.5)
    with pytest.raises(ConfigError, match="means nothing to native generation"):
        TrainerConfig.from_dict({"vllm": {"enforce_eager": True}})


def test_the_choice_is_made_in_one_place() -> None:
    model = tiny_model()
    native = NativeGenerator(model)
    chosen = generator_for(TrainerConfig(use_vllm=True), native, model, 2, 40)
    assert isinstance(chosen, VllmGenerator)
    assert isinstance(chosen, Generator)
    assert (chosen.context, chosen.pad_token_id) == (40, 2)
    assert generator_for(TrainerConfig(), native, model, 2, 40) is native
    assert isinstance(generator_for(TrainerConfig(), chosen, model, 2, 40), NativeGenerator)


class Watched(WithoutWeights):
    """Native generation that remembers what it was told."""

    def __init__(self, model: nn.Module) -> None:
        self.native, self.told = NativeGenerator(model), list[Any]()

    def sync(self, model: nn.Module, version: Any) -> Synced:
        self.told.append(version)
        return Synced(100, 0.25)

    def sleep(self) -> None:
        self.told.append("sleep")

    def generate(self, *args: Any) -> Generated:
        self.told.append("generate")
        return self.native.generate(*args)


def test_a_step_syncs_before_it_samples_and_sleeps_before_it_learns() -> None:
    trainer = grpo()
    assert trainer.step().metrics["sync/bytes"] == 0
    watched = trainer.actor.generator = Watched(trainer.actor.model)
    metrics = trainer.step().metrics
    assert (metrics["sync/bytes"], metrics["sync/seconds"]) == (100, 0.25)
    trainer.load_state_dict(trainer.state_dict())
    trainer.evaluate()
    assert watched.told == [(1, 0), "generate", "sleep", (2, 1), "generate"]


def test_pushing_reads_weights_one_by_one() -> None:
    """No list of all merged weights is ever made: each is dropped once the engine has it."""
    import peft

    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    alive: list[Any] = []

    class Counting(FakeLLM):
        def update_weights(self, request: dict[str, Any]) -> None:
            weights: Iterable[tuple[str, Tensor]] = request["update_info"]["weights"]
            for name, tensor in weights:
                if "q_proj" in name:
                    alive.append(weakref.ref(tensor))
                assert sum(ref() is not None for ref in alive) <= 1

    from rlkit.generation.weights import checkpoint_weights

    Engine(Counting(), None, can_sleep=False, own_group=False).push(checkpoint_weights(model))
    assert len(alive) == 2
