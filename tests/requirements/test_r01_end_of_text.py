"""R01: the end token that was sampled is learned, padding after it is not, though both have the same id."""

from __future__ import annotations

import torch

from rlkit.algorithms.aggregation import token_weights
from rlkit.algorithms.distributions import token_logprobs
from rlkit.algorithms.policy_losses import ppo_clip_loss
from rlkit.batch import RolloutBatch, mask_from_lengths
from rlkit.generation.base import Generated
from rlkit.trainers.rollouts import RolloutTrainer
from tests.batches import COLLECTOR
from tests.generators import WithoutWeights
from tests.tiny import tiny_model
from tests.trainers.toys import grpo

PROMPT = [4, 2, 5]
ENDED, CUT = [5, 6, 2], [5, 6, 7, 8, 9]


def test_r01_masks_come_from_lengths_even_where_padding_is_the_end_token() -> None:
    assert mask_from_lengths([3, 5], 5).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    fields = COLLECTOR.collate_responses([[5, 6, 2], [5, 6, 7, 8, 9]])
    assert fields["response_ids"].tolist() == [[5, 6, 2, 2, 2], [5, 6, 7, 8, 9]]
    assert fields["response_mask"].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert COLLECTOR.collate_prompts([[4, 2, 5]])["attention_mask"].all()
    assert COLLECTOR.collate_prompts([[2, 2], [2]])["attention_mask"].int().tolist() == [[1, 1], [0, 1]]


def test_r01_the_end_token_rises_when_it_was_good_and_padding_after_it_does_not() -> None:

    fields = COLLECTOR.collate_responses([[5, 6, 2]], width=5)
    logits = torch.zeros(1, 5, 10, requires_grad=True)
    logprobs, mask = token_logprobs(logits, fields["response_ids"]), fields["response_mask"]
    loss, _ = ppo_clip_loss(logprobs, logprobs.detach(), torch.ones(1, 5), mask, 0.2, 0.2)
    (loss * token_weights(mask, "token-mean")).sum().backward()
    assert logits.grad is not None
    after = (logits - logits.grad).log_softmax(-1)
    assert after[0, 2, 2] > logprobs[0, 2]
    assert torch.equal(logits.grad[0, 3:], torch.zeros(2, 10))


class Scripted(WithoutWeights):
    """Answers every prompt with the two responses in turn, padded with the end token, as an engine would."""

    def generate(self, input_ids, attention_mask, params, rng, on_finished=None):  # type: ignore[no-untyped-def]
        answers = COLLECTOR.collate_responses([ENDED, CUT] * (len(input_ids) // 2))
        ids, mask = torch.cat([input_ids, answers["response_ids"]], 1), answers["response_mask"]
        return Generated(ids, mask, -2.0 * mask, ["stop", "length"] * (len(input_ids) // 2))


def scripted_trainer() -> RolloutTrainer:
    """Responses that end early are worth 1, those that go on nothing."""
    trainer = grpo(reward=lambda response_length: float(response_length == 3), max_new_tokens=5, batch_size=4, lr=1e-2)
    trainer.actor.generator = Scripted()
    trainer.prompts.next = lambda count: [trainer.prompts.rows[0]] * count  # type: ignore[method-assign,union-attr]
    return trainer


def test_r01_a_step_raises_the_probability_of_the_end_token_that_was_good() -> None:
    trainer = scripted_trainer()
    batch = trainer.evaluate()
    assert batch.response_mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]] * 2
    assert batch.generated_ids[0, batch.prompt_width :].tolist() == [5, 6, 2, 2, 2]
    before = trainer.actor.scores(batch, 1.0).logprobs.detach()
    learned, _ = trainer.gather()
    assert learned.learn_mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]] * 2
    assert bool((learned.advantages[0, :3] > 0).all())
    assert not learned.advantages[0, 3:].any()
    trainer.step()
    after = trainer.actor.scores(batch, 1.0).logprobs.detach()
    assert after[0, 2] > before[0, 2]
    assert after[1, 3:].sum() < before[1, 3:].sum()


def test_r01_prompt_tokens_that_equal_the_padding_are_attended_to() -> None:
    model = tiny_model(initializer_range=0.3)
    fields = COLLECTOR.collate([PROMPT, [1, 4, 2, 5]], [ENDED, ENDED])
    batch = RolloutBatch(fields)
    assert batch.attention_mask.int().tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ENDED])).logits[0, 2:5].log_softmax(-1)
    alone = logits.gather(-1, torch.tensor(ENDED)[:, None]).squeeze(-1)
    trainer = grpo(model=model)
    torch.testing.assert_close(trainer.actor.scores(batch, 1.0).logprobs[0].detach(), alone, atol=1e-5, rtol=0)
