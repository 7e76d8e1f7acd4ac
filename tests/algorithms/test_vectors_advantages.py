"""Every case of the reference vectors of advantages, at the tolerance the files state."""

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.advantages import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    passk_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from tests.algorithms.vectors import Case, cases


def _outcome(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards (B,), groups (B,) and mask (B, T) of a case that gives one reward per response."""
    mask = case.input("response_mask")
    ids = {name: number for number, name in enumerate(case.raw["index"])}
    return case.input("token_level_rewards").sum(1), torch.tensor([ids[name] for name in case.raw["index"]]), mask


@pytest.mark.parametrize("case", cases("grpo_outcome_advantage"))
def test_group_advantages(case: Case) -> None:
    rewards, groups, mask = _outcome(case)
    scale, eps = case.params["norm_adv_by_std"], case.params["epsilon"]
    advantages = group_advantages(rewards, groups, scale, eps, singleton="raw")
    case.check("advantages", advantages[:, None] * mask)
    case.check("returns", advantages[:, None] * mask)


@pytest.mark.parametrize("case", cases("rloo_advantage"))
def test_rloo_advantages(case: Case) -> None:
    rewards, groups, mask = _outcome(case)
    advantages = rloo_advantages(rewards, groups, singleton="raw")
    case.check("advantages", advantages[:, None] * mask)
    case.check("returns", advantages[:, None] * mask)


@pytest.mark.parametrize("case", cases("gpg_advantage"))
def test_gpg_advantages(case: Case) -> None:
    """The file counts rewards other than 0 as active, where the paper counts responses in groups with spread."""
    rewards, groups, mask = _outcome(case)
    assert case.params == {"f_norm": 1.0}
    advantages = gpg_advantages(rewards, groups, singleton="raw", active="nonzero")
    case.check("advantages", advantages[:, None] * mask)


@pytest.mark.parametrize("case", cases("grpo_passk_advantage"))
def test_passk_advantages(case: Case) -> None:
    rewards, groups, mask = _outcome(case)
    scale, eps = case.params["norm_adv_by_std"], case.params["epsilon"]
    case.check("advantages", passk_advantages(rewards, groups, scale_by_std=scale, eps=eps)[:, None] * mask)


@pytest.mark.parametrize("case", cases("reinforce_pp_baseline_advantage"))
def test_reinforce_plus_plus_baseline_advantages(case: Case) -> None:
    rewards, groups, mask = _outcome(case)
    case.check("advantages", reinforce_plus_plus_baseline_advantages(rewards, groups, mask, singleton="raw"))


@pytest.mark.parametrize("case", cases("reinforce_plus_plus_advantage"))
def test_reinforce_plus_plus_advantages(case: Case) -> None:
    mask = case.input("response_mask")
    advantages, returns = reinforce_plus_plus_advantages(case.input("token_level_rewards"), mask, case.params["gamma"])
    case.check("advantages", advantages)
    case.check("returns", returns, mask)


@pytest.mark.parametrize("case", cases("remax_advantage"))
def test_remax_advantages(case: Case) -> None:
    """The file leaves returns in the cells between turns; here they are 0 like everything outside the mask."""
    mask = case.input("response_mask")
    advantages, returns = remax_advantages(case.input("token_level_rewards"), case.input("reward_baselines"), mask)
    case.check("advantages", advantages, mask)
    case.check("returns", returns, mask)
    assert not advantages[mask == 0].any()


@pytest.mark.parametrize("case", cases("gdpo_multi_reward_advantage"))
def test_gdpo_advantages(case: Case) -> None:
    terms = {name: torch.tensor(column, dtype=torch.float64) for name, column in case.raw["rewards"].items()}
    weights = dict(zip(terms, case.params["weights"], strict=True))
    groups, mask = torch.tensor(case.raw["index"]), case.input("response_mask")
    case.check("advantages", gdpo_advantages(terms, weights, groups, mask, case.params["epsilon"]))
