"""R04: rewards to go, whitening and counts see sampled tokens alone; padding a batch wider changes nothing."""

from __future__ import annotations

import math

import torch

from rlkit.algorithms.advantages import gae
from rlkit.algorithms.masked import masked_mean, masked_sum, masked_whiten
from rlkit.batch import RolloutBatch
from rlkit.trainers.estimators import CriticFreeAdvantages, GaeAdvantages
from tests.trainers.toys import grpo, ppo


def test_r04_reward_to_go_counts_real_tokens() -> None:
    rewards, mask = torch.tensor([[1.5, 1.0, 2.0, 2.0]]), torch.tensor([[1, 1, 0, 0]])
    advantages, returns = gae(rewards, torch.zeros(1, 4), mask, 1.0, 1.0)
    assert advantages.tolist() == returns.tolist() == [[2.5, 1.0, 0.0, 0.0]]


def test_r04_counts_and_sums_of_half_precision_numbers_are_exact() -> None:
    ones = torch.ones(1000, dtype=torch.bfloat16)
    assert masked_sum(ones, ones).item() == 1000.0
    assert masked_mean(ones, ones).item() == 1.0
    assert masked_sum(ones, ones).dtype == torch.float32


def test_r04_whitening_ignores_padding() -> None:
    values, mask = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 4)
    wide = torch.nn.functional.pad(values, (0, 50), value=9.0)
    white = masked_whiten(wide, torch.nn.functional.pad(mask, (0, 50)))
    torch.testing.assert_close(white[:, :4], masked_whiten(values, mask))
    assert white[:, 4:].abs().max() == 0
    assert math.isclose(masked_mean(white, torch.nn.functional.pad(mask, (0, 50))).item(), 0.0, abs_tol=1e-6)


def test_r04_the_trainers_estimators_do_not_see_the_width() -> None:
    """Rewards with a KL penalty in them, turned into advantages at widths 4 and 54."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(4) < torch.tensor([[2], [4], [1], [3]])
    fields = {name: torch.randn(4, 4, generator=generator) * mask for name in ("logprobs", "ref_logprobs", "values")}
    fields |= {
        "response_mask": mask,
        "rewards": torch.tensor([1.0, 0.0, 2.0, 1.5]),
        "groups": torch.tensor([0, 0, 1, 1]),
    }
    narrow = RolloutBatch(
        {
            "input_ids": torch.ones(4, 1, dtype=torch.int64),
            **fields,
            "reward_valid": torch.ones(4, dtype=torch.bool),
            "finish_reasons": ["stop"] * 4,
        }
    )
    wide = narrow.resize(1, 54)
    options = {"reference": True, "kl_coef": 0.3, "kl_placement": "reward", "kl_estimator": "k1"}
    for estimator in (
        GaeAdvantages(ppo(**options), penalised=True),
        *(
            CriticFreeAdvantages(grpo(**options, advantage_estimator=name), penalised=True)
            for name in ("grpo", "rloo", "reinforce++", "reinforce++-baseline")
        ),
    ):
        plain, padded = estimator.run(narrow), estimator.run(wide)
        for name in ("token_rewards", "advantages"):
            assert plain[name].abs().max() > 0.1
            torch.testing.assert_close(padded[name][:, :4], plain[name], atol=1e-6, rtol=1e-6)
            assert not padded[name][:, 4:].any()
