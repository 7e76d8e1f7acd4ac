"""R02: what a model says of a sequence does not depend on the padding around it, with absolute positions too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from rlkit.batch import RolloutBatch
from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reference import ReferenceController
from rlkit.controllers.reward import RewardController
from tests.batches import COLLECTOR
from tests.tiny import tiny_tokenizer

PROMPT, ANSWER = [5, 9], [7, 11, 6]  # a sequence of five tokens
LONG = [8, 3, 10, 4, 12, 9, 5, 6]  # beside it, the prompt of two stands behind six pads


def gpt2(kind: Any = GPT2LMHeadModel, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    return kind(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=2, **changes)).eval()


def layouts() -> dict[str, RolloutBatch]:
    """The sequence alone, behind six pads, before four pads, and both; it is always the first row."""
    alone = RolloutBatch(COLLECTOR.collate([PROMPT], [ANSWER]))
    beside = RolloutBatch(COLLECTOR.collate([PROMPT, LONG], [ANSWER, [6] * 7]))
    return {
        "alone": alone,
        "behind six pads": COLLECTOR.pad(alone, 8, None),
        "before four pads": COLLECTOR.pad(alone, None, 7),
        "between longer rows": beside,
    }


def plain(model: Any) -> tuple[Tensor, Tensor]:
    """Log-probs (3,) and last hidden states (3,32) of the answer, from one forward of the bare sequence."""
    with torch.no_grad():
        output = model(torch.tensor([PROMPT + ANSWER]), output_hidden_states=True)
    logprobs = output.logits[0, 1:4].log_softmax(-1).gather(-1, torch.tensor(ANSWER)[:, None]).squeeze(-1)
    return logprobs, output.hidden_states[-1][0, 1:4]


@pytest.mark.parametrize("layout", layouts())
def test_r02_actor_reference_and_critic(layout: str) -> None:
    batch = layouts()[layout]
    actor = ActorController(gpt2(), tiny_tokenizer())
    reference = ReferenceController(gpt2(), tiny_tokenizer())
    critic = CriticController(gpt2(), tiny_tokenizer())
    torch.nn.init.normal_(critic.head.linear.weight)
    logprobs, states = plain(actor.model)
    with torch.no_grad():
        given = actor.scores(batch, 1.0).logprobs[0]
        values = critic.head(states)
    for scores in (given, reference.run(batch)["ref_logprobs"][0]):
        torch.testing.assert_close(scores[:3], logprobs, atol=1e-4, rtol=0)
        assert scores.sum().item() == pytest.approx(logprobs.sum().item(), abs=1e-4)
    torch.testing.assert_close(critic.run(batch)["values"][0, :3], values, atol=1e-4, rtol=0)


def test_r02_without_positions_from_the_mask_the_scores_would_differ() -> None:
    """The fault itself, so that the test above is known to see it."""
    batch = layouts()["behind six pads"]
    model = gpt2()
    with torch.no_grad():
        logits = model(batch.generated_ids, attention_mask=batch.full_attention_mask).logits[0, 7:10]
    wrong = logits.log_softmax(-1).gather(-1, torch.tensor(ANSWER)[:, None]).sum()
    assert abs(wrong.item() - plain(model)[0].sum().item()) > 1e-2


def test_r02_packed_rows_score_as_they_do_alone() -> None:
    """Rows end to end with the positions of the packed batch, each attending to itself."""
    batch = layouts()["between longer rows"]
    packed, model = COLLECTOR.pack(batch), gpt2(attn_implementation="eager")
    ends = packed.cu_seqlens.tolist()
    row = torch.repeat_interleave(torch.arange(2), packed.cu_seqlens.diff().long())
    seen = (row[:, None] == row) & torch.ones(len(row), len(row)).tril().bool()
    bias = torch.zeros(len(row), len(row)).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(
            packed.input_ids[None], position_ids=packed.position_ids[None], attention_mask=bias[None, None]
        ).logits[0]
    assert packed.position_ids[ends[1]].item() == 0
    scores = logits[1:4].log_softmax(-1).gather(-1, torch.tensor(ANSWER)[:, None]).squeeze(-1)
    torch.testing.assert_close(scores, plain(gpt2())[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_r02_reward_models(batch_size: int) -> None:
    """A text alone and beside a longer one: the score of its last token in a bare forward."""
    tokenizer = tiny_tokenizer()
    model = gpt2(GPT2ForSequenceClassification, num_labels=1)
    reward = RewardController(model, tokenizer, batch_size=batch_size)
    texts = {"prompts": ["the film", "it is not so and"], "responses": [" was good", " bad food a very good day to it"]}
    scores = reward.run(RolloutBatch({**texts, "columns": [{}, {}]}))["reward/reward"]
    for prompt, response, score in zip(*texts.values(), scores.tolist(), strict=True):
        ids = torch.tensor([tokenizer(prompt + response)["input_ids"]])
        with torch.no_grad():
            wanted = model.score(model.transformer(ids).last_hidden_state[0, -1]).item()
        assert score == pytest.approx(wanted, abs=1e-4)
