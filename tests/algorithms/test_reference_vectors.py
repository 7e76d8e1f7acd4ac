"""Every case of the reference vectors, values and gradients, at the tolerance the files state.

Advantages, losses, rollout correction and data have files of their own beside this one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.advantages import gae, place_rewards
from rlkit.algorithms.aggregation import aggregate
from rlkit.algorithms.distributions import entropy, logprobs_and_entropy, token_logprobs
from rlkit.algorithms.kl import kl_estimate
from rlkit.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from rlkit.algorithms.policy_losses import ppo_clip_loss
from rlkit.algorithms.value_losses import clipped_value_loss
from rlkit.schedules import adapt_kl_coef
from tests.algorithms.vectors import COUNT_EPSILON, FOLDER, Case, aggregated, cases

KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _kind(name: str) -> str:
    return KL_NAMES.get(name.rstrip("+"), name.rstrip("+")) + "+" * name.count("+")


def _mean(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0].double() / (pair[1].double() + COUNT_EPSILON)


@pytest.mark.parametrize("case", cases("gae"))
def test_gae(case: Case) -> None:
    mask = case.input("response_mask")
    advantages, returns = gae(case.input("token_level_rewards"), case.input("values"), mask, **case.params)
    case.check("advantages_raw", advantages, mask)
    case.check("returns", returns, mask)
    case.check("returns_masked", returns)
    case.check("advantages_whitened", masked_whiten(advantages, mask), mask)
    case.check("advantages_whitened_masked", masked_whiten(advantages, mask))


@pytest.mark.parametrize("case", cases("ppo_clip_loss"))
def test_ppo_clip_loss(case: Case) -> None:
    mask, logprobs = case.input("response_mask"), case.input("log_prob").requires_grad_()
    token_loss, metrics = ppo_clip_loss(
        logprobs,
        case.input("old_log_prob"),
        case.input("advantages"),
        mask,
        case.params["clip_low"],
        case.params["clip_high"],
        case.params["dual_clip_c"],
    )
    if "rollout_is_weights" in case.raw:
        token_loss = token_loss * case.input("rollout_is_weights")
    loss = aggregated(case, token_loss, mask)
    loss.backward()
    case.check("loss", loss.detach())
    assert logprobs.grad is not None
    case.check("grad_log_prob", logprobs.grad)
    names = {
        "actor/pg_clipfrac": "clip_fraction",
        "actor/ppo_kl": "approx_kl",
        "actor/pg_clipfrac_lower": "dual_clip_fraction",
    }
    assert set(case.outputs["metrics"]) == set(names)
    for theirs, ours in names.items():
        wanted = torch.tensor(case.outputs["metrics"][theirs], dtype=torch.float64)
        torch.testing.assert_close(_mean(metrics[ours]), wanted, **case.tolerance)


@pytest.mark.parametrize("case", cases("value_loss_clipped"))
def test_clipped_value_loss(case: Case) -> None:
    mask, values = case.input("response_mask"), case.input("vpreds").requires_grad_()
    clip = case.params["cliprange_value"]
    token_loss, metrics = clipped_value_loss(values, case.input("values"), case.input("returns"), mask, clip)
    loss = aggregated(case, token_loss, mask)
    loss.backward()
    case.check("vf_loss", loss.detach())
    case.check("vf_clipfrac", _mean(metrics["value_clip_fraction"]))
    assert values.grad is not None
    case.check("grad_vpreds", values.grad)


@pytest.mark.parametrize("case", cases("kl_estimators"))
def test_kl_estimate(case: Case) -> None:
    logprobs = case.input("logprob").requires_grad_()
    estimate = kl_estimate(logprobs, case.input("ref_logprob"), _kind(case.params["kind"]))
    estimate.sum().backward()
    case.check("kl", estimate.detach())
    assert logprobs.grad is not None
    case.check("grad_logprob", logprobs.grad)


@pytest.mark.parametrize("case", cases("kl_in_reward"))
def test_kl_in_reward(case: Case) -> None:
    mask, scores = case.input("response_mask"), case.input("token_level_scores")
    kl = kl_estimate(case.input("old_log_probs"), case.input("ref_log_prob"), _kind(case.params["kind"]))
    placed = place_rewards((scores * mask).sum(1), mask, kl, case.params["beta"])
    case.check("token_level_rewards", placed, mask)
    case.check("current_kl", masked_mean(kl, mask, dim=1).mean())


@pytest.mark.parametrize("case", cases("agg_loss"))
def test_aggregation(case: Case) -> None:
    mask, token_loss = case.input("loss_mask"), case.input("loss_mat")
    case.check("loss", aggregated(case, token_loss, mask))
    if "global_batch_size" not in case.params:
        length = case.params.get("loss_scale_factor", mask.shape[1])
        case.check("loss", aggregate(token_loss, mask, case.params["loss_agg_mode"], fixed_length=length))


@pytest.mark.parametrize("case", cases("masked_stats"))
def test_masked_statistics(case: Case) -> None:
    values, mask = case.input("values"), case.input("mask")
    computed: dict[str, Any] = {
        "sum": masked_sum(values, mask),
        "sum_axis-1": masked_sum(values, mask, dim=-1),
        "mean": masked_mean(values, mask),
        "mean_axis-1": masked_mean(values, mask, dim=-1),
        "mean_axis0": masked_mean(values, mask, dim=0),
        "var_unbiased": masked_var(values, mask),
        "var_biased": masked_var(values, mask, unbiased=False),
    }
    white = {"whiten": masked_whiten(values, mask), "whiten_keep_mean": masked_whiten(values, mask, shift_mean=False)}
    assert set(case.outputs) <= {*computed, *white}
    for name in case.outputs:
        case.check(name, *((white[name], mask) if name in white else (computed[name],)))


@pytest.mark.parametrize("case", cases("entropy_logprobs"))
def test_distributions(case: Case) -> None:
    logits, labels = case.input("logits").requires_grad_(), case.input("labels").long()
    logprobs, spread = logprobs_and_entropy(logits, labels)
    for name in {"logprobs_naive", "logprobs_v2"} & set(case.outputs):
        case.check(name, logprobs.detach())
        case.check(name, token_logprobs(logits, labels).detach())
    case.check("entropy", spread.detach())
    case.check("entropy", entropy(logits).detach())
    if "grad_logits" in case.outputs:
        (grad,) = torch.autograd.grad(spread.sum(), logits, retain_graph=True)
        case.check("grad_logits", grad)
    if "sum_pi_squared" in case.outputs:
        every = [token_logprobs(logits, torch.full_like(labels, token)) for token in range(logits.shape[-1])]
        case.check("sum_pi_squared", torch.stack(every).detach().exp().square().sum(0))
    for name in [name for name in case.outputs if name.startswith("entropy_loss[")]:
        mask = case.input("response_mask")
        case.check(name, aggregate(spread, mask, name[13:-1], fixed_length=mask.shape[1]).detach())


@pytest.mark.parametrize("case", cases("kl_controller"))
def test_adaptive_kl(case: Case) -> None:
    coef, values = case.params["init"], []
    for kl, samples in case.raw["updates"]:
        coef = adapt_kl_coef(coef, kl, case.params["target"], case.params["horizon"], samples)
        values.append(coef)
    case.check("values", torch.tensor(values, dtype=torch.float64))


def test_every_vector_file_is_used() -> None:
    tests = Path(__file__).parent
    text = "".join(path.read_text() for path in sorted(tests.glob("test_*vectors*.py")))
    files = list(FOLDER.glob("*.json"))
    assert len(files) == 30
    for path in files:
        assert json.loads(path.read_text())["name"] == path.stem
        assert f'cases("{path.stem}")' in text, f"no test uses {path.name}"
