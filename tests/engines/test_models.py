"""Loading models and tokenizers, and what is asked of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from rlkit.engines.models import (
    context_length,
    hidden_size,
    load_causal_lm,
    load_sequence_classifier,
    load_tokenizer,
    resolve_model,
    same_tokenizer,
)
from rlkit.errors import ModelError
from tests.generation.models import Recurrent, family_model
from tests.tiny import tiny_classifier, tiny_model, tiny_tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a tiny language model and its tokenizer."""
    tiny_model(3).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_language_model_comes_back_in_fp32_and_evaluation_mode(tmp_path: Path) -> None:
    tiny_model(3).bfloat16().save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path)
    assert model.dtype == torch.float32
    assert not model.training
    assert torch.equal(model.lm_head.weight, tiny_model(3).lm_head.weight.bfloat16().float())
    assert load_causal_lm(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_options_reach_from_pretrained(saved: Path) -> None:
    assert load_causal_lm(str(saved), attn_implementation="eager").config._attn_implementation == "eager"


def test_code_that_comes_with_a_model_is_not_run_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "custom", "auto_map": {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}}'
    )
    (tmp_path / "custom.py").write_text("raise RuntimeError('ran')")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_causal_lm(tmp_path)


def test_a_folder_that_is_not_there_is_named(no_network: None) -> None:
    for name in ("./nowhere", "/nowhere/at/all", Path("nowhere")):
        with pytest.raises(ModelError, match="no model folder at .*nowhere"):
            load_causal_lm(name)


def test_an_unknown_hub_id_without_network_fails_at_once(no_network: None) -> None:
    started = time.perf_counter()
    with pytest.raises(ModelError, match=r"'some/model' is no folder here, the hub cannot be reached"):
        load_causal_lm("some/model")
    assert time.perf_counter() - started < 20  # the hub's client alone tries for a minute


def test_an_earlier_download_serves_without_network(
    saved: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    seen = {}

    def snapshot(name: str, **options: object) -> str:
        seen.update(options, name=name)
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("some/model", revision="main") == str(saved)
    assert seen == {"name": "some/model", "revision": "main", "cache_dir": None, "local_files_only": True}


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="as a causal language model"):
        load_causal_lm(tmp_path)


def test_a_plain_language_model_is_no_reward_model(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no sequence-classification model: it holds no weights for score.weight"):
        load_sequence_classifier(saved)
    tiny_classifier(5).save_pretrained(tmp_path / "rm")
    loaded = load_sequence_classifier(tmp_path / "rm")
    assert torch.equal(loaded.score.weight, tiny_classifier(5).score.weight)


def test_a_checkpoint_with_missing_weights_is_no_language_model(tmp_path: Path) -> None:
    tiny_model(0, tie_word_embeddings=False).model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no weights for lm_head.weight"):
        load_causal_lm(tmp_path)


def test_a_models_tokenizer_is_found_where_the_model_came_from(saved: Path) -> None:
    tokenizer = load_tokenizer(load_causal_lm(saved))
    assert same_tokenizer(tokenizer, tiny_tokenizer())
    assert tokenizer.padding_side == "left"
    assert same_tokenizer(load_tokenizer(saved), tokenizer)


def test_a_model_from_nowhere_needs_its_tokenizer_given(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not loaded from a name or folder.*pass tokenizer="):
        load_tokenizer(tiny_model())
    with pytest.raises(ModelError, match="pass tokenizer="):
        load_tokenizer(Recurrent())
    with pytest.raises(ModelError, match=r"no tokenizer found at .*; pass tokenizer="):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_padding_pads_with_its_end_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == 2


def test_tokenizers_are_compared_by_ids() -> None:
    tokenizer = tiny_tokenizer()
    assert same_tokenizer(tokenizer, tokenizer)
    assert same_tokenizer(tokenizer, tiny_tokenizer(chat=True))
    assert not same_tokenizer(tokenizer, tiny_tokenizer(extra=17))
    other_end = tiny_tokenizer()
    other_end.eos_token = "good"
    assert not same_tokenizer(tokenizer, other_end)


def test_context_and_width_are_read_from_the_model() -> None:
    assert context_length(tiny_model()) == 128
    assert context_length(family_model("gpt2")) == 64
    assert context_length(Recurrent()) is None
    assert hidden_size(tiny_model()) == 32
    assert hidden_size(family_model("gpt2")) == 32

    class WithHead(nn.Module):
        def get_output_embeddings(self) -> nn.Module:
            return nn.Linear(24, 48)

    assert hidden_size(WithHead()) == 24
    with pytest.raises(ModelError, match="how wide"):
        hidden_size(Recurrent())
