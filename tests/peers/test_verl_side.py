"""What `benchmarks/with_verl.py` gives to verl 0.9.1 and reads from it; verl itself needs a GPU and is not here."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet
import pytest
from transformers import AutoConfig, AutoTokenizer

from rlkit.errors import RlkitError
from tests.runs.toys import repository

BENCHMARKS = repository() / "benchmarks"


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("with_verl", BENCHMARKS / "with_verl.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(**changed: object) -> argparse.Namespace:
    given = {
        "shape": "tiny",
        "layers": None,
        "groups": 3,
        "group": 2,
        "prompt": 5,
        "response": 7,
        "tokens": 64,
        "steps": 2,
    }
    return argparse.Namespace(**{**given, "verl_path": None, "verl_log": None, "verl_set": [], **changed})


def test_settings_hold_the_shapes_of_the_run(side: ModuleType) -> None:
    given = side.settings(options(verl_set=["trainer.total_training_steps=9"]), Path("/f"), flash_attention=False)
    pairs = dict(setting.split("=", 1) for setting in given[:-1])
    assert len(pairs) == len(given) - 1
    role = "actor_rollout_ref"
    expected = {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": "3",
        "data.max_prompt_length": "5",
        "data.max_response_length": "7",
        f"{role}.actor.ppo_mini_batch_size": "3",
        f"{role}.actor.ppo_max_token_len_per_gpu": "64",
        f"{role}.actor.kl_loss_coef": "0.04",
        f"{role}.ref.log_prob_max_token_len_per_gpu": "128",
        f"{role}.rollout.n": "2",
        f"{role}.rollout.max_num_seqs": "6",
        f"{role}.rollout.max_model_len": "12",
        f"{role}.rollout.ignore_eos": "True",
        f"{role}.model.use_remove_padding": "False",
        f"+{role}.model.override_config.attn_implementation": "sdpa",
        "data.train_files": "/f/prompts.parquet",
        "reward.custom_reward_function.path": "/f/reward.py",
        "trainer.total_training_steps": "3",
        "trainer.logger": "[console,file]",
    }
    assert {key: pairs[key] for key in expected} == expected
    assert given[-1] == "trainer.total_training_steps=9"
    packed = side.settings(options(), Path("/f"), flash_attention=True)
    assert f"+{role}.model.override_config.attn_implementation=flash_attention_2" in packed
    assert f"{role}.model.use_remove_padding=True" in packed


def test_inputs_are_read_back_as_they_were_meant(side: ModuleType, tmp_path: Path) -> None:
    side.write_inputs(options(), tmp_path)
    rows = pyarrow.parquet.read_table(tmp_path / "prompts.parquet").to_pylist()
    prompts = side.prompts_of(3, 5)
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": prompt}] for prompt in prompts]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    ids = tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, return_dict=False)
    assert ids == [int(word[1:]) for word in prompts[0].split()]
    assert len(tokenizer.encode("\n")) == 1
    assert AutoConfig.from_pretrained(tmp_path / "model").num_hidden_layers == 2
    scope: dict = {}
    exec((tmp_path / "reward.py").read_text(), scope)
    assert scope["distinct_words"]("words", "w1 w2 w1 w3", "", extra_info={"index": 0}) == 0.75
    assert scope["distinct_words"]("words", "", "") == 0.0
