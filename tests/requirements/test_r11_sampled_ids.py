"""R11: one beginning token wherever a prompt is read, and what is trained on are the ids that were sampled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlkit.batch import RolloutBatch
from rlkit.controllers.actor import ActorController
from rlkit.controllers.reference import ReferenceController
from rlkit.controllers.reward import RewardController
from rlkit.data import PromptSource
from rlkit.generation.base import Generated
from rlkit.trainers.grpo import GRPOTrainer
from tests.batches import COLLECTOR
from tests.generators import WithoutWeights
from tests.tiny import CHAT_TEMPLATE, tiny_classifier, tiny_model, tiny_tokenizer

BOS, EOS = 1, 2
CHAT = [{"role": "user", "content": "the film"}]


def _source(prompts: Any, tokenizer: Any) -> PromptSource:
    return PromptSource(prompts, tokenizer, 0, 16)


def _with_bos(template: str) -> Any:
    tokenizer = tiny_tokenizer(bos=True)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", ["{{ bos_token }} " + CHAT_TEMPLATE, CHAT_TEMPLATE])
def test_r11_exactly_one_bos_for_chat_and_for_text(template: str) -> None:
    tokenizer = _with_bos(template)
    assert tokenizer("a")["input_ids"][0] == BOS
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    for prompt in ("the film", CHAT, "<s> the film", rendered):
        (row,) = _source([prompt], tokenizer).rows
        assert Counter(row.ids)[BOS] == 1, prompt
        assert row.ids[0] == BOS


def test_r11_no_bos_where_the_tokenizer_uses_none() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    assert tokenizer.bos_token_id == BOS
    for prompt in ("the film", CHAT):
        (row,) = _source([prompt], tokenizer).rows
        assert BOS not in row.ids


@pytest.mark.parametrize(
    ("template", "prompt"),
    [("{{ bos_token }} " + CHAT_TEMPLATE, CHAT), (None, "the film was"), (None, "<s> the film was")],
    ids=["chat", "text", "text that begins with it"],
)
def test_r11_actor_reference_and_reward_model_read_one_bos(template: str | None, prompt: Any) -> None:
    """Counted where the ids go into each model: in the actor's rollout and update, in the reference, in the reward."""
    tokenizer = _with_bos(template) if template else tiny_tokenizer(bos=True)
    actor = ActorController(tiny_model(0), tokenizer)
    reference = ReferenceController(tiny_model(1), tokenizer)
    reward = RewardController(tiny_classifier(), tokenizer)
    read: dict[str, list[int]] = {}
    for name, model in (("actor", actor.model), ("reference", reference.model), ("reward", reward.model)):
        assert model is not None
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        embedding.register_forward_pre_hook(
            lambda _, arguments, name=name: read.setdefault(name, []).extend(arguments[0][0].tolist()[:4])
        )
    config = {"batch_size": 2, "group_size": 2, "max_new_tokens": 2, "kl_coef": 0.1}
    trainer = GRPOTrainer(actor, reward, reference, prompts=[prompt], config=config)
    batch = trainer.evaluate()
    assert (batch.input_ids == BOS).sum(1).tolist() == [1, 1]
    ids = batch.input_ids[0].tolist()
    assert ids[0] == BOS
    assert read["reference"][:4] == ids[:4]
    assert read["reward"].count(BOS) == 1
    assert read["reward"][0] == BOS
    trainer.step()
    assert all(row[0] == BOS for row in (read["actor"], read["reference"]))


# Ids that the tokenizer would write otherwise


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs that make one token of "hello": ids 4 and 5 are "he" and "llo", 6 is "hello"."""
    vocabulary = ["<unk>", "<s>", "</s>", "ask", "he", "llo", "hello", "h", "e", "l", "o", "ll", "a", "s", "k", "as"]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("a", "s"), ("as", "k")]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges, unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>", pad_token="</s>")


class Splitting(WithoutWeights):
    """Answers "hello" in two tokens to the first of two prompts and in one to the second."""

    def generate(self, input_ids, attention_mask, params, rng, on_finished=None):  # type: ignore[no-untyped-def]
        answers = COLLECTOR.collate_responses([[4, 5, EOS], [6, EOS]] * (len(input_ids) // 2))
        mask = answers["response_mask"]
        ids = torch.cat([input_ids, answers["response_ids"]], 1)
        return Generated(ids, mask, torch.full(mask.shape, -2.0) * mask, ["stop"] * len(input_ids))


def test_r11_two_sampled_tokens_stay_two_though_their_text_is_one() -> None:
    tokenizer = merging_tokenizer()
    assert tokenizer("hello")["input_ids"] == [6]
    assert tokenizer.decode([4, 5]) == tokenizer.decode([6]) == "hello"
    seen: list[str] = []

    def longer(responses: list[str], response_lengths: list[int]) -> list[float]:
        seen.extend(responses)
        return [float(length) for length in response_lengths]

    model = tiny_model(initializer_range=0.2)
    actor = ActorController(model, tokenizer)
    actor.generator = Splitting()
    config = {"batch_size": 2, "group_size": 2, "max_new_tokens": 3, "ppo_epochs": 2, "lr": 1e-3}
    trainer = GRPOTrainer(actor, longer, prompts=["ask"], config=config)
    trainer.follow_settings()
    batch, lessons = trainer.gather()
    assert seen == ["hello", "hello"]
    assert batch.generated_ids[:, batch.prompt_width :].tolist() == [[4, 5, EOS], [6, EOS, EOS]]
    assert batch.response_mask.int().tolist() == [[1, 1, 1], [1, 1, 0]]
    (lesson,) = lessons
    assert isinstance(lesson.batch, RolloutBatch)
    assert torch.equal(lesson.batch.generated_ids, batch.generated_ids)
    with torch.no_grad():
        logprobs = model(torch.tensor([[3, 4, 5, EOS]])).logits[0, :3].log_softmax(-1)
    wanted = [logprobs[t, token].item() for t, token in enumerate((4, 5, EOS))]
    assert batch.logprobs[0].tolist() == pytest.approx(wanted, abs=1e-4)
    before = actor.scores(batch, 1.0).logprobs.detach()
    assert batch.advantages[0, 0] > 0
    trainer.learner.learn(lessons, 0)
    assert bool((actor.scores(batch, 1.0).logprobs[0] > before[0]).all())
