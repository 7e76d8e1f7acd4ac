"""R12: every log-prob belongs to one declared distribution, the one that sampled, truncated or not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlkit.algorithms.distributions import token_logprobs
from rlkit.batch import RolloutBatch
from rlkit.controllers.actor import ActorController
from rlkit.errors import ConfigError
from rlkit.generation.base import SamplingParams
from rlkit.generation.sampling import sample
from rlkit.trainers.grpo import GRPOTrainer
from rlkit.trainers.rollouts import RolloutTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.toys import grpo, ppo

SKEWED = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
FULL, KEPT = -0.6931, -0.4700
"""Log-prob of a token of probability 0.5, and of the same once top-p 0.8 has left 0.8 of the mass."""


def grid(n: int) -> Tensor:
    """(n,) uniforms in the middle of n equal parts of [0, 1)."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


@pytest.mark.parametrize(("temperature", "wanted"), [(1.0, -0.4076), (0.5, -0.1429), (2.0, -0.6803)])
def test_r12_temperature_divides_the_logits(temperature: float, wanted: float) -> None:
    logprob = token_logprobs(torch.tensor([2.0, 1.0, 0.0]), torch.tensor(0), temperature)
    assert logprob.item() == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_r12_a_temperature_that_defines_no_distribution_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        token_logprobs(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), temperature)


@pytest.mark.parametrize(("temperature", "logprob"), [(1.0, -0.4076), (0.5, -0.1429), (2.0, -0.6803)])
def test_r12_the_samplers_log_prob_is_that_of_the_tempered_distribution(temperature: float, logprob: float) -> None:
    tokens, logprobs = sample(
        torch.tensor([[2.0, 1.0, 0.0]]), SamplingParams(1, temperature=temperature), torch.zeros(1, dtype=torch.float64)
    )
    assert tokens.tolist() == [0]
    assert logprobs.item() == pytest.approx(logprob, abs=1e-4)


def test_r12_top_p_renormalises_over_the_kept_tokens() -> None:
    tokens, logprobs = sample(SKEWED.expand(1000, 4), SamplingParams(1, top_p=0.8), grid(1000))
    assert set(tokens.tolist()) == {0, 1}
    assert logprobs[tokens == 0].tolist() == pytest.approx([-0.4700] * 625, abs=1e-4)  # log(0.5 / 0.8)
    assert logprobs[tokens == 1].tolist() == pytest.approx([math.log(0.3 / 0.8)] * 375, abs=1e-5)


def test_r12_log_probs_of_the_loss_belong_to_the_sampling_temperature() -> None:
    trainer = ppo(temperature=0.6)
    metrics = trainer.step().metrics
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert ppo(top_p=0.5).step().metrics["rollout/logprob_gap_max"] < 1e-4
    assert ppo(top_k=5, temperature=0.6).step().metrics["rollout/logprob_gap_max"] < 1e-4


def gathered(trainer: RolloutTrainer) -> RolloutBatch:
    """The batch that the next step would learn from."""
    trainer.follow_settings()
    return trainer.gather()[0]


class Unigram(nn.Module):
    """A policy that gives the four words of ids 5 to 8 the probabilities 0.5, 0.3, 0.15 and 0.05, always."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=48)
        self.logits = nn.Parameter(torch.full((48,), -1e9).index_copy(0, torch.arange(5, 9), SKEWED))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, 48))


def unigram_trainer(**config: Any) -> GRPOTrainer:
    actor = ActorController(Unigram(), tiny_tokenizer())
    settings = {"batch_size": 64, "group_size": 64, "max_new_tokens": 1, "max_prompt_length": 8, "ppo_epochs": 2}
    reward = {"good": lambda response: float("good" in response)}
    return GRPOTrainer(actor, reward, prompts=["the film"], config={**settings, **config})


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_r12_trainer_and_sampler_agree_at_every_temperature(temperature: float) -> None:
    trainer = unigram_trainer(temperature=temperature)
    batch = gathered(trainer)
    wanted = (SKEWED / temperature).log_softmax(0)[batch.generated_ids[:, -1] - 5]
    for name in ("rollout_logprobs", "logprobs"):
        torch.testing.assert_close(batch[name][:, 0], wanted, atol=1e-4, rtol=0)


def test_r12_the_loss_uses_the_truncated_distribution() -> None:
    """Sampler and trainer give -0.4700; the full softmax would give -0.6931."""
    trainer = unigram_trainer(top_p=0.8)
    batch = gathered(trainer)
    first = batch.generated_ids[:, -1] == 5
    assert set(batch.generated_ids[:, -1].tolist()) == {5, 6}
    assert batch.rollout_logprobs[first].flatten().tolist() == pytest.approx([KEPT] * int(first.sum()), abs=1e-4)
    assert batch.logprobs[first].flatten().tolist() == pytest.approx([KEPT] * int(first.sum()), abs=1e-4)
    full = trainer.actor.scores(batch, 1.0).logprobs.detach()
    assert full[first].flatten().tolist() == pytest.approx([FULL] * int(first.sum()), abs=1e-4)
    metrics = trainer.step().metrics
    assert metrics["rollout/logprob_gap_max"] < 1e-6
    assert metrics["train/first_ratio_max_abs_log"] == 0.0


def test_r12_top_p_leaves_nothing_to_correct() -> None:
    """The ratio of trainer to sampler is 1 on every token."""
    batch = gathered(unigram_trainer(top_p=0.8, correction_weights="token"))
    assert batch.correction_weights.flatten().tolist() == pytest.approx([1.0] * 64, abs=1e-4)


@pytest.mark.parametrize("build", [ppo, grpo])
def test_r12_identical_weights_at_06_have_a_mean_ratio_of_1(build: Any) -> None:
    """Of trainer to sampler, token by token, for a model that is far from uniform."""
    trainer = build(temperature=0.6, model=tiny_model(initializer_range=0.3), ppo_epochs=2)
    batch = gathered(trainer)
    ratios = (batch.logprobs - batch.rollout_logprobs).exp()[batch.response_mask]
    assert ratios.mean().item() == pytest.approx(1.0, abs=0.01)
    assert (ratios - 1).abs().max() < 1e-3
    raw = trainer.actor.scores(batch, 1.0).logprobs.detach()
    assert ((raw - batch.rollout_logprobs).exp()[batch.response_mask] - 1).abs().max() > 0.3


@pytest.mark.parametrize("temperature", [0.0, -0.5, math.inf])
def test_r12_a_trainer_refuses_a_temperature_that_defines_no_distribution(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        ppo(temperature=temperature)
