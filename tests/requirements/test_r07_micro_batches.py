"""R07: the accumulated gradient is that of one batch: for every aggregation, split, order and loss term."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlkit.algorithms.aggregation import aggregate, token_weights
from rlkit.algorithms.distributions import logprobs_and_entropy
from rlkit.algorithms.kl import kl_estimate
from rlkit.algorithms.policy_losses import ppo_clip_loss
from rlkit.algorithms.value_losses import clipped_value_loss
from rlkit.batch import RolloutBatch
from rlkit.trainers.base import Trainer, new_learner
from rlkit.trainers.ppo import PPOTrainer
from tests.batches import COLLECTOR
from tests.tiny import tiny_model
from tests.trainers.gradients import distance, flat_gradient
from tests.trainers.toys import grpo, ppo

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
TRAINER_MODES = [mode for mode in MODES if mode != "token-sum"]


def test_r07_token_mean_counts_tokens_not_micro_batches() -> None:
    losses, mask = torch.tensor([[1.0, 1, 1, 1], [4, 0, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    assert aggregate(losses, mask, "token-mean").item() == pytest.approx(1.6)
    weights = token_weights(mask, "token-mean")
    assert sum((losses[row] * weights[row]).sum().item() for row in range(2)) == pytest.approx(1.6)


class Model(nn.Module):
    """A bigram language model with a value head: the smallest thing that has every loss term."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits, self.value = nn.Embedding(11, 11), nn.Embedding(11, 1)


def _objective(model: Model, batch: dict[str, Tensor], weights: Tensor, rows: list[int]) -> Tensor:
    """Policy + KL + entropy + value loss of some rows, with their share of the minibatch's weights."""
    part = {name: tensor[rows] for name, tensor in batch.items()}
    logprobs, entropy = logprobs_and_entropy(model.logits(part["before"]), part["ids"], 0.9)
    policy, _ = ppo_clip_loss(logprobs, part["old"], part["advantages"], part["mask"], 0.2, 0.3, 3.0)
    values = model.value(part["before"]).squeeze(-1)
    value, _ = clipped_value_loss(values, part["values"], part["returns"], part["mask"], 0.2)
    kl = kl_estimate(logprobs, part["reference"], "k3")
    return ((policy + 0.1 * kl - 0.05 * entropy + 0.5 * value) * weights[rows]).sum()


def _gradient(model: Model, batch: dict[str, Tensor], weights: Tensor, split: list[list[int]]) -> Tensor:
    model.zero_grad()
    for rows in split:
        _objective(model, batch, weights, rows).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("mode", MODES)
def test_r07_the_accumulated_gradient_is_that_of_one_batch(mode: str) -> None:
    rng = torch.Generator().manual_seed(3)
    rows, width = 9, 6
    batch = {name: torch.randint(11, (rows, width), generator=rng) for name in ("before", "ids")}
    for name in ("old", "reference", "advantages", "values", "returns"):
        batch[name] = torch.randn(rows, width, generator=rng) - (2.4 if name in ("old", "reference") else 0)
    lengths = torch.tensor([6, 1, 3, 2, 6, 5, 4, 1, 0])
    batch["mask"] = torch.arange(width) < lengths[:, None]
    weights, model = token_weights(batch["mask"], mode, fixed_length=width), Model()
    whole = _gradient(model, batch, weights, [list(range(8))])
    assert whole.norm() > 0.01
    splits = [
        [[i] for i in range(8)],
        [[0, 1], [2, 3, 4, 5, 6, 7]],
        [[5, 6, 7], [0, 1, 2, 3, 4]],
        [[8], [7, 3, 1], [8], [0, 2, 4, 5, 6]],
    ]
    for split in splits:
        parts = _gradient(model, batch, weights, split)
        assert (parts - whole).norm() / whole.norm() < 1e-5, split


# The same with a trainer's own objective and models

LENGTHS = [6, 1, 3, 2, 6, 5, 4, 1, 0]
SPLITS = {
    "8 x 1": [[row] for row in range(8)],
    "2 + 6": [[0, 1], [2, 3, 4, 5, 6, 7]],
    "3 + 5": [[5, 6, 7], [0, 1, 2, 3, 4]],
    "empty ones between": [[8], [7, 3, 1], [8], [0, 2, 4, 5, 6]],
}


def nine_rollouts() -> RolloutBatch:
    """Rows of 1 to 6 tokens and a last one without any that are learned from, with everything a PPO loss reads."""
    rng = torch.Generator().manual_seed(3)
    answers = [torch.randint(3, 48, (max(n, 1),), generator=rng).tolist() for n in LENGTHS]
    prompts = [torch.randint(3, 48, (2 + row % 3,), generator=rng).tolist() for row in range(9)]
    fields: dict[str, Any] = COLLECTOR.collate(prompts, answers)
    mask = fields["response_mask"]
    for name in ("logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "values", "returns"):
        fields[name] = (torch.randn(mask.shape, generator=rng) / 3 - (3.8 if "logprobs" in name else 0)) * mask
    return RolloutBatch({**fields, "learn_mask": mask & (torch.tensor(LENGTHS) > 0)[:, None]})


def trainer_gradient(trainer: PPOTrainer, split: list[list[int]], weights: Tensor, batch: RolloutBatch) -> Tensor:
    """Gradient of actor, head and (where it has its own model) critic over the micro-batches."""
    parameters = [p for engine in trainer.learner.engines.values() for p in engine.parameters.values()]
    for parameter in parameters:
        parameter.grad = None
    for rows in split:
        trainer.policy_objective().accumulate(batch.select(rows), weights[rows], 1.0, first=True)
    return flat_gradient(parameters)


@pytest.mark.parametrize("trunk", [True, False], ids=["critic on the trunk", "critic of its own"])
@pytest.mark.parametrize("mode", TRAINER_MODES)
def test_r07_policy_kl_entropy_and_value_terms_in_any_split(mode: str, trunk: bool) -> None:
    options = {"kl_coef": 0.1, "kl_placement": "loss", "kl_estimator": "k3", "entropy_coef": 0.05}
    trainer = ppo(
        trunk=trunk, reference=True, model=tiny_model(initializer_range=0.2), loss_aggregation=mode, **options
    )
    assert trainer.critic is not None
    torch.manual_seed(0)
    torch.nn.init.normal_(trainer.critic.head.linear.weight)
    batch = nine_rollouts().to(trainer.actor.device)
    weights = trainer.policy_objective().weights(batch)
    whole = trainer_gradient(trainer, [list(range(8))], weights, batch)
    assert whole.norm() > 1e-2
    for name, split in SPLITS.items():
        assert distance(trainer_gradient(trainer, split, weights, batch), whole) < 1e-5, name


@pytest.mark.parametrize("mode", TRAINER_MODES)
def test_r07_each_term_is_there(mode: str) -> None:
    """Each of the four terms changes the gradient, so that none of them could hide in the test above."""
    batch, gradients = nine_rollouts(), []
    on = {"kl_coef": 0.1, "entropy_coef": 0.05, "value_coef": 0.5}
    for off in (None, *on):
        options = {**on, **({off: 0.0} if off else {}), "kl_placement": "loss", "kl_estimator": "k3"}
        trainer = ppo(reference=True, model=tiny_model(initializer_range=0.2), loss_aggregation=mode, **options)
        weights = trainer.policy_objective().weights(batch)
        gradients.append(trainer_gradient(trainer, [list(range(9))], weights, batch))
    for without in gradients[1:]:
        assert distance(without, gradients[0]) > 1e-4


def parameters(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.actor.model.parameters()])


@pytest.mark.parametrize("build", [ppo, grpo])
@pytest.mark.parametrize("micro", [1, 3, 5])
def test_r07_micro_batches_change_neither_weights_nor_metrics(build: Any, micro: int) -> None:
    options = {"reference": True, "kl_coef": 0.1, "entropy_coef": 0.01, "lr": 1e-3}
    whole, split = build(**options), build(**options, micro_batch_size=micro)
    for trainer in (whole, split):
        # Adam's first update only sees signs; plain descent shows the gradient itself.
        trainer.actor.optimizer = torch.optim.SGD(trainer.actor.model.parameters(), lr=0.5)
        trainer.learner = new_learner(trainer)
    before = parameters(whole).clone()
    a, b = whole.step().metrics, split.step().metrics
    moved = parameters(whole) - before
    assert moved.norm() > 1e-5
    assert (parameters(split) - before - moved).norm() / moved.norm() < 1e-5
    timing = ("time", "latency", "memory", "throughput")
    for name in a:
        if not any(word in name for word in timing):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
