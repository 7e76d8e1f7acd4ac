"""Prompt sources: every form of input, exact resume (R17), clear refusals."""

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from rlkit.data import OPENINGS, PromptRow, PromptSource
from rlkit.errors import CheckpointError, ConfigError, DataError
from tests.tiny import tiny_tokenizer

PLAIN = tiny_tokenizer()
BOS, EOS = 1, 2
TEN = [f"the film w{i}" for i in range(10)]
CHAT = [{"role": "user", "content": "the film"}]


def _source(prompts: Any = TEN, tokenizer: Any = PLAIN, seed: int = 0, limit: int = 16, **options: Any) -> PromptSource:
    return PromptSource(prompts, tokenizer, seed, limit, **options)


def _drawn(source: PromptSource, *counts: int) -> list[int]:
    return [row.index for n in counts for row in source.next(n)]


# Forms of input


def test_a_list_of_text() -> None:
    source = _source(["the film was", "a day"], shuffle=False)
    first, second = source.next(2)
    assert first == PromptRow(0, "the film was", PLAIN("the film was")["input_ids"], {})
    assert (second.index, second.text, second.ids) == (1, "a day", PLAIN("a day")["input_ids"])
    assert len(source) == 2


def test_rows_with_columns() -> None:
    rows = [{"prompt": "the film", "answer": 4}, {"prompt": "a day", "level": "easy"}]
    source = _source(rows)
    assert [row.columns for row in source.rows] == [{"answer": 4, "level": None}, {"answer": None, "level": "easy"}]
    renamed = _source([{"question": "the film", "prompt": "unused"}], prompt_column="question")
    assert (renamed.rows[0].text, renamed.rows[0].columns) == ("the film", {"prompt": "unused"})


def test_chats() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    several = [{"role": "user", "content": "the film"}, {"role": "assistant", "content": "good"}, *CHAT]
    source = _source([CHAT, {"prompt": several, "answer": 1}, "a day"], tokenizer)
    one, more, text = source.rows
    assert tokenizer.decode(one.ids) == "<user> the film </s> <assistant>"
    assert one.text == "the film"
    assert one.columns == {"messages": CHAT, "answer": None}
    assert more.text == "user: the film\nassistant: good\nuser: the film"
    assert more.columns == {"messages": several, "answer": 1}
    assert text.columns == {"messages": None, "answer": None}


def test_files_and_datasets_give_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    import pandas as pd

    rows = [{"prompt": prompt, "answer": i} for i, prompt in enumerate(TEN)]
    (tmp_path / "rows.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    given = [
        rows,
        tmp_path / "rows.jsonl",
        str(tmp_path / "rows.parquet"),
        datasets.Dataset.from_list(rows),
        tuple(rows),
    ]
    sources = [_source(prompts) for prompts in given]
    assert all(source.rows == sources[0].rows for source in sources)
    assert len({source.fingerprint for source in sources}) == 1


def test_a_jsonl_file_of_text_with_odd_line_separators(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('"the film\u2028was"\n"a day"\n', encoding="utf-8")
    assert [row.text for row in _source(path).rows] == ["the film\u2028was", "a day"]


def test_the_built_in_openings_are_short_and_different() -> None:
    assert len(OPENINGS) == len(set(OPENINGS)) >= 16
    assert all(opening == opening.strip() and 2 <= len(opening.split()) <= 8 for opening in OPENINGS)
    assert len(_source(OPENINGS)) == len(OPENINGS)


# Special tokens


def test_an_end_token_that_the_tokenizer_adds_is_not_part_of_the_prompt() -> None:
    tokenizer = tiny_tokenizer(bos=True)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    assert tokenizer("a")["input_ids"][-1] == EOS
    assert _source(["the film"], tokenizer).rows[0].ids == [BOS, *PLAIN("the film")["input_ids"]]


# Order and resume


def test_every_epoch_has_every_prompt_once_in_another_order() -> None:
    source = _source()
    epochs = [_drawn(source, 10) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert source.epoch == 3


def test_the_order_depends_on_the_seed_alone() -> None:
    assert _drawn(_source(), 30) == _drawn(_source(), *[3] * 10) == _drawn(_source(), 7, 7, 16)
    assert _drawn(_source(seed=1), 30) != _drawn(_source(), 30)
    assert _drawn(_source(shuffle=False), 12) == [*range(10), 0, 1]
    assert Counter(_drawn(_source(), 25)).most_common()[-1][1] == 2


def test_drawing_leaves_global_random_numbers_alone() -> None:
    import random

    import numpy as np
    import torch

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    _drawn(_source(), 25)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("saved_at", [0, 2, 5, 6, 13, 15])
def test_r17_a_resumed_source_goes_on_as_if_it_had_never_stopped(saved_at: int) -> None:
    straight = _drawn(_source(), *[2] * 15)
    first = _source()
    head = _drawn(first, *[2] * saved_at)
    second = _source(seed=99)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    third = _source()
    third.load_state_dict(second.state_dict())
    assert head + _drawn(third, *[2] * (15 - saved_at)) == straight
    assert _drawn(pickle.loads(pickle.dumps(second)), 2) == _drawn(second, 2)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 7),
    before=st.lists(st.integers(1, 9), max_size=6),
    after=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seed=st.integers(0, 5),
)
def test_r17_resume_is_exact_at_any_point(size: int, before: list[int], after: list[int], seed: int) -> None:
    source, resumed = _source(TEN[:size], seed=seed), _source(TEN[:size])
    _drawn(source, *before)
    resumed.load_state_dict(source.state_dict())
    assert _drawn(resumed, *after) == _drawn(source, *after)
    assert resumed.state_dict() == source.state_dict()


def test_r17_other_prompts_are_detected() -> None:
    state = _source().state_dict()
    others = [TEN[:9], TEN[::-1], [*TEN[:9], "a day"], [{"prompt": prompt, "answer": 1} for prompt in TEN]]
    for prompts in others:
        source = _source(prompts)
        with pytest.raises(DataError, match=r"saved with other prompts .*the same prompts in the same order"):
            source.load_state_dict(state)
        assert source.state_dict()["position"] == 0


def test_a_state_with_other_keys_is_refused() -> None:
    source = _source()
    state = source.state_dict()
    for bad in ({**state, "extra": 1}, {key: state[key] for key in list(state)[1:]}):
        with pytest.raises(CheckpointError, match=r"differs in \['(extra|epoch)'\]"):
            source.load_state_dict(bad)


# Refusals


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "the prompt source is empty"),
        (["the film", ""], "prompt 1 is empty .*Drop the row"),
        (["the film", "  \n"], "prompt 1 is empty"),
        (["the film", "a " * 17], "prompt 1 has 17 tokens, more than the limit of 16. .*raise max_prompt_length"),
        (["the film", 3], "prompt 1 is a int; expected text or a list of chat messages"),
        ([{"prompt": None}], "prompt 0 is a NoneType"),
        ([{"text": "the film"}], r"row 0 has no column 'prompt'; it has \['text'\]. Set prompt_column"),
        (["the film", CHAT], "prompt 1 is a chat, but the tokenizer has no chat template"),
        ([[]], "prompt 0 is empty; a chat needs at least one message"),
        ([[{"role": "user", "content": " "}]], "prompt 0 is empty"),
        ([[{"role": "user"}]], "prompt 0 has a message .*expected a dict with text under role and content"),
        ([["the film"]], "prompt 0 has a message 'the film'"),
        (CHAT, r"look like the messages of one chat; put the chat into a list"),
        (7, "cannot read prompts from a int; expected a list, a datasets.Dataset"),
        (iter(TEN), "cannot read prompts from a list_iterator"),
        ("the film was", "expected a .jsonl or .parquet file, or a list of prompts"),
        ("missing.jsonl", "'missing.jsonl' does not exist"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _source(prompts)


def test_unreadable_files_are_named_with_the_line(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.jsonl", b'"the film"\n{"prompt": \n', r"line 2 of .*a\.jsonl' is not JSON"),
        ("b.jsonl", b'"\xff\xfe"\n', r"cannot read .*b\.jsonl'"),
        ("c.parquet", b"not parquet", r"cannot read .*c\.parquet'"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            _source(tmp_path / name)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_prompt_length must be at least 1 token, given 0"):
        _source(limit=0)
    with pytest.raises(ConfigError, match="seed of a prompt source must be 0 or more, given -1"):
        _source(seed=-1)
    with pytest.raises(ConfigError, match="at least one prompt, given 0"):
        _source().next(0)
