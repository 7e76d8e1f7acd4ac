"""Training an adapter: the base model stays as it is and serves as reference, and runs take both along."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

import rlkit
from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reference import ReferenceController
from rlkit.errors import ModelError
from rlkit.trainers.ppo import PPOTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.toys import CONFIG, PROMPTS, good

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def adapter_trainer() -> PPOTrainer:
    torch.manual_seed(0)
    actor = ActorController(tiny_model(), tiny_tokenizer(), peft_config=LoraConfig(**LORA))
    critic = CriticController(trunk=actor)
    return PPOTrainer(
        actor, critic, good, ReferenceController(actor), prompts=PROMPTS, config={**CONFIG, "kl_coef": 0.01}
    )


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.actor.model.state_dict().items()}


def test_r22_the_base_model_is_the_reference_and_never_moves() -> None:
    trainer = adapter_trainer()
    before = weights(trainer)
    first = trainer.step().metrics
    assert first["kl/per_token"] <= 1e-6
    for _ in range(5):
        metrics = trainer.step().metrics
    assert metrics["kl/per_token"] > 0
    after = weights(trainer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name}


def test_r22_a_trained_adapter_needs_a_reference_of_its_own() -> None:
    model = get_peft_model(tiny_model(), LoraConfig(**LORA))
    actor = ActorController(model, tiny_tokenizer())
    ReferenceController(actor)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    with pytest.raises(ModelError, match="adapter is not fresh.*pass a model of its own"):
        ReferenceController(actor)


def test_a_checkpoint_holds_the_adapter_and_the_run_folder_its_base(tmp_path) -> None:
    trainer, twin = adapter_trainer(), adapter_trainer()
    state = trainer.state_dict()["controllers"]["actor"]["model"]
    assert state
    assert all("lora_" in name for name in state)
    run = trainer.start(str(tmp_path / "exp"), steps=2)
    run.wait(timeout=120)
    assert run.load() is trainer
    for _ in range(2):
        twin.step()
    expected = weights(twin)
    for loaded in (trainer, rlkit.attach(tmp_path / "exp").load()):
        found = weights(loaded)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
