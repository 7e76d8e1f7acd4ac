"""The surface of the two documents that rlkit grew from, under rlkit's names, for what needs one device."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlkit
from rlkit import (
    ActorController,
    CriticController,
    Dataflow,
    DeviceMap,
    PPOTrainer,
    RewardController,
    RLTrainer,
    TrainerConfig,
)
from tests.tiny import tiny_classifier, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a small language model and a small reward model, with their tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for name, model in (("llm", tiny_model()), ("rm", tiny_classifier())):
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    return root


def test_import_and_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", rlkit.__version__)


def test_flash_attention_is_detected():
    from rlkit.utils import is_flash_attn_available

    assert isinstance(is_flash_attn_available(), bool)


def test_a_dataflow_is_declared_and_closes_its_loop(saved):
    llm = AutoModelForCausalLM.from_pretrained(saved / "llm")
    tokenizer = AutoTokenizer.from_pretrained(saved / "llm")
    actor = ActorController(model=llm, tokenizer=tokenizer)
    critic = CriticController(model=tiny_model(1))
    reward_model = RewardController(model=str(saved / "rm"))

    dataflow = Dataflow()
    dataflow.connect(actor.output, reward_model.input)
    dataflow.connect(reward_model.output, critic.input)
    dataflow.connect(critic.output, actor.feedback)

    dataflow.validate()
    assert [[c.name for c in stage] for stage in dataflow.stages()] == [["actor"], ["reward"], ["critic"]]
    assert "<svg" in str(dataflow._repr_mimebundle_())

    trainer = PPOTrainer(
        actor=actor,
        critic=critic,
        reward_model=reward_model,
        prompts=["the film was"],
        config={"batch_size": 4, "max_new_tokens": 4},
        dataflow=dataflow,
    )
    assert trainer.step().step == 1


def test_an_actor_takes_a_model_and_an_optimizer_as_they_are(saved):
    llm = AutoModelForCausalLM.from_pretrained(saved / "llm")
    actor = ActorController(
        model=llm,
        tokenizer=AutoTokenizer.from_pretrained(saved / "llm"),
        optimizer=torch.optim.AdamW(llm.parameters(), lr=1e-6),
    )
    assert actor.model is llm


def test_a_device_map_is_a_declaration(saved):
    actor = ActorController(str(saved / "llm"))
    actor.device_map = DeviceMap(strategy="single", devices=["cpu"])
    assert actor.device == "cpu"
    sharded = DeviceMap(strategy="fsdp", devices=["cuda:0", "cuda:1", "cuda:2", "cuda:3"], sharding_dim="model")
    assert len(sharded.devices) == 4
    assert DeviceMap(strategy="tp", devices="cuda:5-6", tp_size=2).devices == ("cuda:5", "cuda:6")
    with pytest.raises(rlkit.errors.PlacementError, match="one device"):
        actor.device_map = sharded


def test_the_first_ppo_flow_in_twenty_lines(saved, capsys):
    tokenizer = AutoTokenizer.from_pretrained(saved / "llm")
    actor_model = AutoModelForCausalLM.from_pretrained(saved / "llm")
    critic_model = AutoModelForCausalLM.from_pretrained(saved / "llm")
    reward_model = AutoModelForCausalLM.from_pretrained(saved / "llm")

    actor = ActorController(model=actor_model, tokenizer=tokenizer)
    critic = CriticController(model=critic_model)
    reward = RewardController(model=reward_model)

    trainer = PPOTrainer(
        actor=actor,
        critic=critic,
        reward_model=reward,
        config={"batch_size": 32, "ppo_epochs": 4, "lr": 1e-6},
    )
    for epoch in range(10):
        trainer.step()
        print(f"Epoch {epoch} completed")
    assert trainer.global_step == 10
    assert capsys.readouterr().out.count("completed") == 10


def test_a_reward_controller_by_step():
    simple_rm = RewardController(lambda response: 0.0, name="simple")
    complex_rm = RewardController(lambda response: 1.0, name="complex")
    ensemble_rm = RewardController(lambda response: 0.5, name="ensemble")

    def get_active_reward_controller(step):
        if step < 1:
            return simple_rm
        if step < 2:
            return complex_rm
        return ensemble_rm

    actor = ActorController(tiny_model(), tiny_tokenizer())
    trainer = PPOTrainer(
        actor=actor,
        critic=CriticController(trunk=actor),
        reward_model=simple_rm,
        prompts=["the film was"],
        config={"batch_size": 2, "max_new_tokens": 2},
    )
    means = []
    for _ in range(3):
        trainer.set_reward_controller(get_active_reward_controller(trainer.global_step))
        means.append(trainer.step().metrics["reward/mean"])
    assert means == [0.0, 1.0, 0.5]


def test_several_rewards_with_weights():
    accuracy_rm = RewardController(lambda response: 1.0, name="accuracy")
    safety_rm = RewardController(lambda response: 2.0, name="safety")
    conciseness_rm = RewardController(lambda response: 3.0, name="conciseness")
    info_rm = RewardController(lambda response: 4.0, name="info")
    weights = {"accuracy": 0.4, "safety": 0.3, "conciseness": 0.2, "info": 0.1}

    actor = ActorController(tiny_model(), tiny_tokenizer())
    trainer = PPOTrainer(
        actor=actor,
        critic=CriticController(trunk=actor),
        reward_model=accuracy_rm,
        prompts=["the film was"],
        config={"batch_size": 2, "max_new_tokens": 2},
    )
    trainer.set_multi_reward_controllers(
        [
            (accuracy_rm, weights["accuracy"]),
            (safety_rm, weights["safety"]),
            (conciseness_rm, weights["conciseness"]),
            (info_rm, weights["info"]),
        ]
    )
    assert trainer.step().metrics["reward/mean"] == pytest.approx(0.4 + 0.6 + 0.6 + 0.4)


def test_a_trainer_from_names_with_checkpoints(saved, tmp_path):
    config = TrainerConfig(
        batch_size=4,
        max_new_tokens=4,
        actor_device_mapping={"model": "cpu"},
        reward_device_mapping={"model": "cpu"},
        critic_device_mapping={"model": "cpu"},
        checkpoint_config={"save_interval": 1, "keep_last_k": 3, "async_save": True},
    )
    trainer = RLTrainer(
        config=config, actor_model=str(saved / "llm"), reward_model=str(saved / "rm"), prompts=["the film was"]
    )
    run = trainer.train(steps=5, dir=tmp_path / "exp", progress=False, track_metrics=["csv", "tensorboard"])
    assert run.state == "finished"
    kept = sorted(path.name for path in (run.dir / "checkpoints").iterdir())
    assert kept == ["step_000003", "step_000004", "step_000005"]
    metrics = run.metrics
    for name in ("rollout/throughput_tokens_per_sec", "reward/latency_ms", "train/step_time_ms"):
        assert (metrics[name] > 0).all()
    assert len(metrics) == 5


def test_loading_options_pass_through_to_from_pretrained(saved, tmp_path):
    actor = ActorController(
        str(saved / "llm"), trust_remote_code=True, offload_folder=str(tmp_path), dtype=torch.bfloat16
    )
    assert actor.model.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="offload_folder"):
        ActorController(tiny_model(), tiny_tokenizer(), offload_folder=str(tmp_path))
