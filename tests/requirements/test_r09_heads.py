"""R09: heads of critics and reward models come back bit for bit, and none is made up where there was none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlkit.batch import RolloutBatch
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reward import RewardController
from rlkit.controllers.scorers import Judge
from rlkit.engines.heads import save_head
from rlkit.errors import ModelError
from tests.batches import COLLECTOR
from tests.tiny import tiny_classifier, tiny_model, tiny_tokenizer
from tests.trainers.toys import ppo


def rollouts() -> RolloutBatch:
    return RolloutBatch(COLLECTOR.collate([[5, 6], [7, 8, 9]], [[7, 8, 2], [10, 2]]))


def test_r09_a_language_model_by_name_is_no_reward_model_and_no_critic(tmp_path) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError):
        RewardController(str(tmp_path))
    assert RewardController(str(tmp_path), judge=Judge()).model is not None
    with pytest.raises(ModelError, match="holds no value head.*new_head=True"):
        CriticController(str(tmp_path))
    critic = CriticController(str(tmp_path), new_head=True)
    torch.nn.init.normal_(critic.head.linear.weight)
    save_head(critic.head, tmp_path)
    again = CriticController(str(tmp_path))
    assert torch.equal(again.head.linear.weight, critic.head.linear.weight)
    assert torch.equal(again.run(rollouts())["values"], critic.run(rollouts())["values"])


LOADS = """
import sys
import torch
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reward import RewardController

critic, reward = CriticController(sys.argv[1]), RewardController(sys.argv[2])
torch.save({"critic": critic.head.state_dict(), "reward": reward.model.score.state_dict()}, sys.argv[3])
"""


def test_r09_trained_heads_in_a_fresh_process(tmp_path: Path) -> None:
    """A critic of two steps, and a reward model that an optimizer moved."""
    trainer = ppo(trunk=False)
    assert trainer.critic is not None
    start = {name: tensor.clone() for name, tensor in trainer.critic.head.state_dict().items()}
    named = trainer.learner.engines["critic"].parameters
    assert {"critic.head.linear.weight", "critic.head.linear.bias"} <= set(named)
    for _ in range(2):
        trainer.step()
    classifier = tiny_classifier()
    fresh = classifier.score.weight.detach().clone()
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1)
    classifier(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    optimizer.step()
    for folder, model in (("critic", trainer.critic.model), ("reward", classifier)):
        model.save_pretrained(tmp_path / folder)
        tiny_tokenizer().save_pretrained(tmp_path / folder)
    save_head(trainer.critic.head, tmp_path / "critic")

    out = tmp_path / "heads.pt"
    arguments = [str(tmp_path / "critic"), str(tmp_path / "reward"), str(out)]
    subprocess.run([sys.executable, "-c", LOADS, *arguments], check=True, timeout=120)
    loaded = torch.load(out)
    for name, tensor in trainer.critic.head.state_dict().items():
        assert torch.equal(loaded["critic"][name], tensor)
        assert not torch.equal(tensor, start[name])
    assert torch.equal(loaded["reward"]["weight"], classifier.score.weight)
    assert not torch.equal(classifier.score.weight, fresh)


def test_r09_a_trainers_state_holds_the_head() -> None:
    trainer, twin = ppo(trunk=True), ppo(trunk=True)
    for _ in range(2):
        trainer.step()
    assert trainer.critic is not None
    assert twin.critic is not None
    assert bool(trainer.critic.head.linear.weight.any())
    twin.load_state_dict(trainer.state_dict())
    assert torch.equal(twin.critic.head.linear.weight, trainer.critic.head.linear.weight)
