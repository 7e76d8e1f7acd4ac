"""What `benchmarks/with_verl.py` gives to verl 0.9.1 and reads from it; verl itself needs a GPU and is not here."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

import pyarrow.parquet
import pytest
from transformers import AutoConfig, AutoTokenizer

from rlkit.errors import RlkitError
from tests.runs.toys import repository

BENCHMARKS = repository() / "benchmarks"
LINES = "\n".join(
    [
        '{"step":1,"data":{'
        '"actor/grad_norm":4.010227712569758e-05,"actor/perf/max_memory_allocated_gb":3.5,'
        '"response_length/max":16.0,"response_length/min":16.0,"prompt_length/max":8.0,'
        '"prompt_length/min":8.0,"timing_s/gen":4.060583515005419,'
        '"timing_s/old_log_prob":0.05104216800100403,"timing_s/ref":1.4523731579974992,'
        '"timing_s/adv":0.05385369199939305,"timing_s/update_actor":1.7920400660004816,'
        '"timing_s/update_weights":0.034074338000209536,"timing_s/step":68.39253054800065,'
        '"perf/throughput":2.8073241107118654}}',
        '{"step":2,"data":{'
        '"actor/grad_norm":4.466226891963743e-05,"actor/perf/max_memory_allocated_gb":3.0,'
        '"response_length/max":16.0,"response_length/min":16.0,"prompt_length/max":8.0,'
        '"prompt_length/min":8.0,"timing_s/gen":2.0295917890034616,'
        '"timing_s/old_log_prob":0.03280123999866191,"timing_s/ref":1.1382420320005622,'
        '"timing_s/adv":0.07319514400296612,"timing_s/update_actor":1.44475208199583,'
        '"timing_s/update_weights":0.03438999100035289,"timing_s/step":4.8011740389993065,'
        '"perf/throughput":39.99021873408654}}',
        '{"step":3,"data":{'
        '"actor/grad_norm":4.561883179121651e-05,"actor/perf/max_memory_allocated_gb":3.25,'
        '"response_length/max":16.0,"response_length/min":16.0,"prompt_length/max":8.0,'
        '"prompt_length/min":8.0,"timing_s/gen":2.037383435002994,'
        '"timing_s/old_log_prob":0.036471976003667805,"timing_s/ref":0.9154971940006362,'
        '"timing_s/adv":0.05499660500208847,"timing_s/update_actor":1.5582921579989488,'
        '"timing_s/update_weights":0.04899850399669958,"timing_s/step":4.710197770000377,'
        '"perf/throughput":40.76261961288828}}',
    ]
)
"""Lines of verl 0.9.1 from three steps, some of their metrics; peaks were set by hand."""


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


def test_steps_after_the_first_are_parsed(side: ModuleType) -> None:
    seconds, peak, stages = side.parsed(LINES, options(prompt=8, response=16))
    assert seconds == [4.8011740389993065, 4.710197770000377]
    assert peak == 3.25
    assert sorted(stages) == ["adv", "gen", "old_log_prob", "ref", "update_actor", "update_weights"]
    assert stages["gen"] == [2.0295917890034616, 2.037383435002994]
    assert stages["update_actor"] == [1.44475208199583, 1.5582921579989488]


def test_other_lengths_than_asked_for_are_refused(side: ModuleType) -> None:
    with pytest.raises(RlkitError, match=r"had {\(8.0, 16.0\)} tokens, not \(8, 17\)"):
        side.parsed(LINES, options(prompt=8, response=17))


def fake(folder: Path, side: ModuleType, main: str) -> Path:
    """A folder with empty modules of all that is needed, and `main` as verl's main program."""
    for name in side.NEEDED:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    (folder / "verl" / "trainer").mkdir()
    (folder / "verl" / "trainer" / "__init__.py").touch()
    (folder / "verl" / "trainer" / "main_ppo.py").write_text(main)
    return folder


WRITES = """
import os, sys
assert "data.train_batch_size=3" in sys.argv and sys.argv[-1] == "trainer.device=cuda"
print("a line of verl")
open(os.environ["VERL_FILE_LOGGER_PATH"], "w").write(open(sys.path[1] + "/lines").read())
"""


def test_steps_of_a_process_are_reported(side: ModuleType, tmp_path: Path) -> None:
    folder = fake(tmp_path, side, WRITES)
    (folder / "lines").write_text(LINES)
    given = options(
        prompt=8, response=16, verl_path=str(folder), verl_log=tmp_path / "log", verl_set=["trainer.device=cuda"]
    )
    assert side.verl_side(given, "cuda") == side.parsed(LINES, given)
    assert (tmp_path / "log").read_text() == "a line of verl\n"


@pytest.mark.parametrize(
    ("main", "message"),
    [
        ("raise SystemExit('no kernel image')", "code 1 after 0 of 3 steps.*no kernel image"),
        ("print('left early')", "code 0 after 0 of 3 steps.*left early"),
    ],
)
def test_a_process_that_stops_early_shows_its_last_lines(
    side: ModuleType, tmp_path: Path, main: str, message: str
) -> None:
    with pytest.raises(RlkitError, match=f"(?s){message}"):
        side.verl_side(options(verl_path=str(fake(tmp_path, side, main))), "cuda")


def test_without_verl_it_says_what_to_install(
    side: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side, "NEEDED", ("json", "not_to_be_found"))
    with pytest.raises(RlkitError, match=r'run: not_to_be_found not found. `pip install "verl\[vllm\]==0.9.1"'):
        side.verl_side(options(verl_path=str(tmp_path)), "cuda")
