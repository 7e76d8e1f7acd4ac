"""R08: a reward is read at the last attended token, found by the mask, for padding on both sides and pad = eos."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.batch import RolloutBatch
from rlkit.controllers.reward import RewardController
from rlkit.controllers.scorers import ClassifierScorer
from rlkit.engines.heads import pool_last
from tests.tiny import tiny_classifier, tiny_tokenizer

IDS = [1, 9, 2, 5, 6, 2]
TEXT = ("<s> was </s>", " good bad </s>")


def texts(*pairs: tuple[str, str]) -> RolloutBatch:
    prompts, responses = zip(*pairs, strict=True)
    return RolloutBatch({"prompts": prompts, "responses": responses, "columns": [{} for _ in pairs]})


def states_of(model: Any) -> Tensor:
    """(6,) what the score head says at each position of the bare sequence."""
    with torch.no_grad():
        scores: Tensor = model.score(model.model(torch.tensor([IDS])).last_hidden_state)[0, :, 0]
    return scores


def test_r08_the_score_of_six_real_tokens_is_that_of_index_5() -> None:
    model, tokenizer = tiny_classifier(initializer_range=0.2), tiny_tokenizer()
    assert tokenizer("".join(TEXT))["input_ids"] == IDS
    at = states_of(model)
    assert (at[5] - at[4]).abs() > 1e-3
    score = RewardController(model, tokenizer).run(texts(TEXT))["reward/reward"]
    assert score.tolist() == pytest.approx([at[5].item()], abs=1e-5)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (0, 2), (3, 1)])
def test_r08_padding_on_either_side_gives_the_same_score(left: int, right: int) -> None:
    model = tiny_classifier(initializer_range=0.2)
    reward = RewardController(model, tiny_tokenizer())
    assert isinstance(reward.scorer, ClassifierScorer)
    ids = torch.tensor([[2] * left + IDS + [2] * right])
    mask = torch.tensor([[False] * left + [True] * 6 + [False] * right])
    with torch.no_grad():
        score = reward.scorer._read(ids, mask)
    assert score.tolist() == pytest.approx([states_of(model)[5].item()], abs=1e-4)
    assert pool_last(torch.arange(float(ids.shape[1])).view(1, -1, 1), mask).item() == left + 5


def test_r08_a_classifier_is_read_at_its_last_real_token_though_padding_is_the_end_token() -> None:
    model, tokenizer = tiny_classifier(), tiny_tokenizer()
    reward = RewardController(model, tokenizer, batch_size=8)
    pairs = [("the film was", " good </s> bad </s>"), ("it is", " a very very very good day </s>"), ("food", " </s>")]
    together = reward.run(texts(*pairs))["reward/reward"]
    alone = torch.cat([reward.run(texts(pair))["reward/reward"] for pair in pairs])
    assert torch.allclose(together, alone, atol=1e-5)
    ids = torch.tensor([tokenizer("".join(pairs[0]))["input_ids"]])
    hidden = model.model(ids).last_hidden_state[0, -1]
    assert together[0].item() == pytest.approx(model.score(hidden).item(), abs=1e-5)
