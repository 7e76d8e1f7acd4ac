"""Preference pairs: every form of input, the boundary between prompt and answer (R31), resume, refusals, batches."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlkit.data.pairs import PreferenceBatch
from rlkit.data.preferences import PreferenceRow, PreferenceSource
from rlkit.errors import DataError
from tests.tiny import tiny_tokenizer

PLAIN, CHATTY = tiny_tokenizer(), tiny_tokenizer(chat=True)
EOS = 2
PAIR = {"prompt": "the film was", "chosen": "very good", "rejected": "bad"}
USER = [{"role": "user", "content": "the film"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def source(pairs: Any, tokenizer: Any = PLAIN, limit: int = 64, **options: Any) -> PreferenceSource:
    return PreferenceSource(pairs, tokenizer, 0, max_length=limit, **options)


def ids(text: str, tokenizer: Any = PLAIN) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def test_a_pair_of_texts_ends_with_one_end_token() -> None:
    (row,) = source([PAIR]).next(1)
    assert row == PreferenceRow(
        0, "the film was", ids("the film was"), "very good", [*ids("very good"), EOS], "bad", [*ids("bad"), EOS], {}
    )


def test_an_answer_that_has_its_end_token_gets_no_second_one() -> None:
    (row,) = source([{**PAIR, "chosen": "very good </s>"}]).next(1)
    assert row.chosen_ids == [*ids("very good"), EOS]


def test_other_columns_stay_with_the_pair(tmp_path: Any) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({**PAIR, "source": "a"}) + "\n")
    (row,) = source(path).next(1)
    assert row.columns == {"source": "a"}


def test_a_dataset_and_a_parquet_file_give_the_same_rows(tmp_path: Any) -> None:
    from datasets import Dataset

    pairs = [PAIR, {**PAIR, "chosen": "good"}]
    data = Dataset.from_list(pairs)
    data.to_parquet(tmp_path / "pairs.parquet")
    listed = source(pairs).rows
    assert source(data).rows == listed
    assert source(str(tmp_path / "pairs.parquet")).rows == listed


CHATS = {
    "prompt and answers as messages": {"prompt": USER, "chosen": said("good"), "rejected": said("bad")},
    "answers as text": {"prompt": USER, "chosen": "good", "rejected": "bad"},
    "two whole chats": {"chosen": USER + said("good"), "rejected": USER + said("bad")},
}


@pytest.mark.parametrize("form", CHATS)
def test_chats_in_every_form_are_the_same_pair(form: str) -> None:
    (row,) = source([CHATS[form]], CHATTY).next(1)
    assert row.prompt_ids == ids("<user> the film </s> <assistant>", CHATTY)
    assert (row.chosen_ids, row.rejected_ids) == ([*ids("good"), EOS], [*ids("bad"), EOS])
    assert (row.prompt, row.chosen, row.rejected) == ("the film", "good", "bad")


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, and one merge that spans the boundary between a prompt that ends with "] " and an answer with "$"."""
    characters = ["<unk>", "</s>", "a", " ", "]", "$", "4", "6", "] ", "] $"]
    core = Tokenizer(
        models.BPE({token: i for i, token in enumerate(characters)}, [("]", " "), ("] ", "$")], unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Sequence([])
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    )
    return tokenizer


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat template"])
def test_r31_prompt_ids_are_the_same_for_both_answers_and_the_loss_covers_the_answers_exactly(chat: bool) -> None:
    tokenizer = merging_tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer("a ] $46")["input_ids"]) == ["a", " ", "] $", "4", "6"]
    pair: dict[str, Any] = {"prompt": "a ] ", "chosen": "46", "rejected": "$46"}
    if chat:
        pair = {"prompt": [{"role": "user", "content": "a ] "}], "chosen": said("46"), "rejected": said("$46")}
    batch = PreferenceBatch.from_rows(source([pair], tokenizer).next(1), pad_token_id=1)
    width = batch.rollouts.prompt_width
    prompts = batch.rollouts.generated_ids[:, :width]
    assert torch.equal(prompts[0], prompts[1])
    assert tokenizer.decode(prompts[0]) == "a ] "
    spans = [
        tokenizer.decode(row[width:][mask])
        for row, mask in zip(batch.rollouts.generated_ids, batch.rollouts.response_mask, strict=True)
    ]
    assert spans == ["46</s>", "$46</s>"]


def test_r31_a_template_that_rewrites_the_prompt_is_refused() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ loop.length }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with pytest.raises(DataError, match="pair 0.*template"):
        source([CHATS["answers as text"]], tokenizer)


def test_exact_resume_in_the_middle_of_an_epoch() -> None:
    pairs = [{**PAIR, "prompt": f"the film w{i}"} for i in range(7)]
    straight, stopped = source(pairs), source(pairs)
    drawn = [row.index for n in (3, 3, 5) for row in straight.next(n)]
    assert sorted(drawn[:7]) == list(range(7))
    first = [row.index for row in stopped.next(3)]
    resumed = source(pairs)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert first + [row.index for n in (3, 5) for row in resumed.next(n)] == drawn
    with pytest.raises(DataError, match="other pairs"):
        source(pairs[:6]).load_state_dict(stopped.state_dict())


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ({"prompt": "the film", "chosen": "good"}, r"pair 0 is \['chosen', 'prompt'\]"),
        ("the film", "pair 0 is str"),
        ({**PAIR, "rejected": "  "}, "pair 0: its rejected answer is empty"),
        ({**PAIR, "rejected": "very good"}, "same answer"),
        ({**PAIR, "prompt": " "}, "prompt 0 is empty"),
        ({**PAIR, "chosen": 3}, "pair 0 holds prompt: str, chosen: int"),
        ({"chosen": "the film was good", "rejected": "the film was bad"}, "pair 0 holds prompt: NoneType"),
        ({**PAIR, "chosen": "good " * 70}, r"chosen answer 71, together more than the limit of 64"),
        (
            {"prompt": "day " * 20, "chosen": "good", "rejected": "bad"},
            "prompt has 20 tokens, more than .* 9",
        ),
        ({"chosen": USER + said("good"), "rejected": said("bad") + USER}, "do not begin alike"),
    ],
)
def test_what_cannot_be_a_pair_is_refused_with_its_number(pair: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        source([pair], CHATTY, max_prompt_length=9)


def test_no_pairs_and_a_missing_end_token_are_refused() -> None:
    with pytest.raises(DataError, match="pair source is empty"):
        source([])
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(DataError, match="no end token"):
        source([PAIR], endless)


def test_pairs_as_rollouts_and_back() -> None:
    rows = source([PAIR, {**PAIR, "prompt": "a day", "chosen": "so so good"}], shuffle=False).next(2)
    batch = PreferenceBatch.from_rows(rows, pad_token_id=EOS)
    assert len(batch) == 2
    assert batch.chosen("responses") == ["very good", "so so good"]
    assert batch.rejected("responses") == ["bad", "bad"]
    assert batch.rollouts.response_mask.sum(1).tolist() == [3, 2, 4, 2]
    assert batch.rollouts.preferences.tolist() == [1, -1, 1, -1]
    assert batch.rollouts.groups.tolist() == [0, 0, 1, 1]
    second = batch.select(torch.tensor([1])).trim()
    assert second.chosen("responses") == ["so so good"]
    assert second.rollouts.prompt_width == 2
    with pytest.raises(DataError, match="even number of rows"):
        PreferenceBatch(batch.rollouts.select(slice(0, 3)))
