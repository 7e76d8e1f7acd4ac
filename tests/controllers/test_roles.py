"""Rewards, critics and references: what each takes as a model, what it reads, and what it refuses."""

from __future__ import annotations

import math
import pickle

import cloudpickle
import peft
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlkit.batch import RolloutBatch
from rlkit.controllers.actor import ActorController
from rlkit.controllers.reference import ReferenceController
from rlkit.controllers.reward import RewardController
from rlkit.controllers.scorers import Judge
from rlkit.device_map import DeviceMap
from rlkit.errors import ConfigError, ModelError, PlacementError, RewardError
from rlkit.rewards import overlong_penalty
from tests.tiny import tiny_classifier, tiny_model, tiny_tokenizer


def texts(*pairs: tuple[str, str]) -> RolloutBatch:
    prompts, responses = zip(*pairs, strict=True)
    return RolloutBatch({"prompts": prompts, "responses": responses, "columns": [{} for _ in pairs]})


def rollouts() -> RolloutBatch:
    return RolloutBatch(
        {
            "input_ids": torch.tensor([[2, 5, 6], [7, 8, 9]]),
            "attention_mask": torch.tensor([[False, True, True], [True, True, True]]),
            "generated_ids": torch.tensor([[2, 5, 6, 7, 8, 2], [7, 8, 9, 10, 2, 2]]),
            "response_mask": torch.tensor([[True, True, True], [True, True, False]]),
        }
    )


def test_stop_tokens_come_from_model_and_tokenizer() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    assert ActorController(model, tokenizer).stop_token_ids == (2,)
    model.generation_config.eos_token_id = [7, 2]
    tokenizer.eos_token = "good"
    actor = ActorController(model, tokenizer)
    assert actor.stop_token_ids == actor.sampling.stop_token_ids == (2, 5, 7)


def test_a_classifier_with_several_outputs_needs_a_label() -> None:
    with pytest.raises(ModelError, match=r"has 3 outputs.*label=0\.\.2"):
        RewardController(tiny_classifier(num_labels=3), tiny_tokenizer())
    shares = [
        RewardController(tiny_classifier(num_labels=3), tiny_tokenizer(), label=i).run(texts(("a", " good")))
        for i in range(3)
    ]
    assert sum(float(share["reward/reward"]) for share in shares) == pytest.approx(1.0, abs=1e-5)


def test_a_language_model_judges_by_yes_or_no_through_its_own_template() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer(chat=True)
    judge = Judge(question="is {response} a good film", yes="Yes", no="No")
    reward = RewardController(model, tokenizer, name="judge", judge=judge)
    score = reward.run(texts(("the film", "it")))["reward/judge"]
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "is it a good film"}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer(shown, add_special_tokens=False)["input_ids"]])
    logits = model(ids).logits[0, -1]
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No"))
    assert float(score) == pytest.approx(float(torch.sigmoid(logits[yes] - logits[no])), abs=1e-5)
    with pytest.raises(ModelError, match="begin with the same token"):
        RewardController(model, tokenizer, judge=Judge(yes="good", no="good"))


def test_a_reward_model_that_gives_no_number_is_named() -> None:
    model = tiny_classifier()
    torch.nn.init.constant_(model.score.weight, math.nan)
    with pytest.raises(RewardError, match="gave nan for sample 0"):
        RewardController(model, tiny_tokenizer()).run(texts(("the film", " was good")))
    with pytest.raises(RewardError, match="callable, a model or a path, got int"):
        RewardController(3)


def test_a_tokenizer_that_takes_one_text_is_enough_for_a_reward_model() -> None:
    class OneText:
        """A user's own."""

        def __init__(self) -> None:
            self.inner = tiny_tokenizer()

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            assert isinstance(text, str)
            return {"input_ids": self.inner(text, add_special_tokens=add_special_tokens)["input_ids"]}

    batch = texts(("the film", " was good"), ("the day", " is"))
    scores = [RewardController(tiny_classifier(), made).run(batch) for made in (OneText(), tiny_tokenizer())]
    assert torch.equal(scores[0]["reward/reward"], scores[1]["reward/reward"])


def test_a_text_without_a_token_is_an_error() -> None:
    with pytest.raises(RewardError, match="no token of ''.*must not both be empty"):
        RewardController(tiny_classifier(), tiny_tokenizer()).run(texts(("the film", " was good"), ("", "")))


def test_only_functions_of_one_response_are_scored_while_others_are_still_sampled() -> None:
    assert RewardController(lambda response: 0.0, name="one").streams
    assert not RewardController(lambda responses: [0.0] * len(responses), name="all").streams
    assert not RewardController(tiny_classifier(), tiny_tokenizer()).streams


def test_a_reference_is_a_copy_that_does_not_follow_the_actor() -> None:
    actor = ActorController(tiny_model(), tiny_tokenizer())
    reference = ReferenceController(actor)
    before = reference.run(rollouts())["ref_logprobs"]
    assert torch.equal(before, actor.scores(rollouts(), 1.0).logprobs.detach())
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.add_(0.1)
    assert torch.equal(reference.run(rollouts())["ref_logprobs"], before)
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


def test_a_reference_on_the_actors_model_knows_no_dropout() -> None:
    """GPT-2 has dropout of 0.1 after its embeddings and in every layer; a model made from a configuration trains."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2))
    adapter = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    actor = ActorController(model, tiny_tokenizer(), peft_config=adapter)
    settings = {"temperatures": torch.ones(2), "top_ks": torch.zeros(2, dtype=torch.int64), "top_ps": torch.ones(2)}
    batch = rollouts().with_fields(settings)
    given = ReferenceController(actor).run(batch)["ref_logprobs"]
    assert actor.model.training
    torch.testing.assert_close(given, actor.scores(batch, 1.0).logprobs.detach())  # the adapter is fresh


def test_a_controller_goes_to_one_device_that_is_there() -> None:
    actor = ActorController(tiny_model(), tiny_tokenizer(), device_map=DeviceMap(devices="cpu"))
    assert (actor.device, actor.has_own_device_map) == ("cpu", True)
    with pytest.raises(PlacementError):
        actor.device_map = DeviceMap(devices="cuda:97")


def test_a_reward_reads_lengths_and_finish_reasons_where_its_function_asks_for_them() -> None:
    plain = ("prompts", "responses", "columns")
    assert RewardController(lambda response: 0.0).reads == plain
    reward = RewardController(overlong_penalty(3, 2))
    assert (reward.name, reward.reads, reward.streams) == ("overlong_penalty", (*plain, "response_mask"), True)
    both = RewardController(lambda response_lengths, finish_reasons: [0.0] * len(response_lengths), name="both")
    assert (both.reads, both.streams) == ((*plain, "response_mask", "finish_reasons"), False)
    batch = rollouts().with_fields(
        {"prompts": ["a", "b"], "responses": ["x", "y"], "columns": [{}, {}], "finish_reasons": ["length", "stop"]}
    )
    assert reward.run(batch)["reward/overlong_penalty"].tolist() == [-1.0, -0.5]
    cut = RewardController(lambda response_length, finish_reason: response_length * (finish_reason == "length"))
    assert cut.run(batch)["reward/reward"].tolist() == [3.0, 0.0]


def test_options_for_functions_are_checked_and_are_none_of_a_models() -> None:
    for options in ({"timeout": 1.0}, {"workers": 1}, {"on_error": "abstain"}):
        with pytest.raises(ConfigError, match="are for reward functions"):
            RewardController(tiny_classifier(), tiny_tokenizer(), **options)
    with pytest.raises(ConfigError, match="timeout must be seconds above 0"):
        RewardController(len, timeout=-1)
    with pytest.raises(RewardError, match="'timeouts' is the name of a metric"):
        RewardController(len, name="timeouts")
    assert RewardController(tiny_classifier(), tiny_tokenizer()).take_failures() == {"timeouts": 0, "errors": 0}


def test_a_reward_controller_travels_without_what_runs_for_it() -> None:
    seen = []

    async def judge(responses):
        seen.append(len(responses))
        return [0.5] * len(responses)

    for reward in (RewardController(lambda response: 1.0, workers=1), RewardController(judge, batch_size=1)):
        scores = reward.run(texts(("a", "b"), ("c", "d")))[reward.field].tolist()
        copy = pickle.loads(cloudpickle.dumps(reward))
        assert copy.run(texts(("a", "b"), ("c", "d")))[reward.field].tolist() == scores
        copy.close()
        reward.close()
    assert seen == [1, 1]
