"""Every case of the reference vectors of policy and preference losses, gradients included."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.distributions import token_logprobs
from rlkit.algorithms.gradient_losses import dppo_kl_loss, dppo_tv_loss, dro_loss, gpg_loss
from rlkit.algorithms.policy_losses import LossMetrics, ppo_clip_loss
from rlkit.algorithms.preference_losses import best_and_worst, dpo_loss, sequence_logprobs
from rlkit.algorithms.ratio_losses import RESPONSE_AGGREGATION, cispo_loss, gmpo_loss, gspo_loss, sapo_loss
from tests.algorithms.vectors import COUNT_EPSILON, Case, aggregated, cases

Loss = Callable[..., tuple[Tensor, LossMetrics]]
CLIPS = {"clip_low": "clip_low", "clip_high": "clip_high"}
METRICS = {"actor/pg_clipfrac": "clip_fraction", "actor/ppo_kl": "approx_kl"}
LOWER = "actor/pg_clipfrac_lower"


def _run(
    case: Case, loss: Loss, options: Mapping[str, str], sum_up: Callable[[Case, Tensor, Tensor], Tensor] = aggregated
) -> LossMetrics:
    """Checks loss and gradient; `options` maps the function's options to the file's parameters."""
    mask, logprobs = case.input("response_mask"), case.input("log_prob").requires_grad_()
    columns = [case.input(name) for name in ("old_log_prob", "advantages") if name in case.raw]
    chosen = {ours: case.params[theirs] for ours, theirs in options.items()}
    token_loss, metrics = loss(logprobs, *columns, mask, **chosen)
    total = sum_up(case, token_loss, mask)
    total.backward()
    case.check("loss", total.detach())
    assert logprobs.grad is not None
    case.check("grad_log_prob", logprobs.grad)
    assert not token_loss[mask == 0].any()
    policy_loss, count = metrics["policy_loss"]
    assert policy_loss.item() == pytest.approx(token_loss.sum().item())
    assert count.item() == mask.sum().item()
    return metrics


def _check_metrics(
    case: Case, metrics: LossMetrics, names: Mapping[str, str], absent: tuple[str, ...] = (LOWER,)
) -> None:
    """Every metric of the file, as a mean; those that the loss does not have (`absent`) are 0 there."""
    for theirs, wanted in case.outputs["metrics"].items():
        if theirs not in names:
            assert theirs in absent
            assert wanted == 0.0
            continue
        total, count = metrics[names[theirs]]
        given = total.double() / (count.double() + COUNT_EPSILON)
        torch.testing.assert_close(given, torch.tensor(wanted, dtype=torch.float64), **case.tolerance)


@pytest.mark.parametrize("case", cases("dapo_clip_higher_loss"))
def test_clip_higher(case: Case) -> None:
    metrics = _run(case, ppo_clip_loss, {**CLIPS, "dual_clip": "dual_clip_c"})
    _check_metrics(case, metrics, {**METRICS, LOWER: "dual_clip_fraction"})


@pytest.mark.parametrize("case", cases("gspo_loss"))
def test_gspo_loss(case: Case) -> None:
    assert case.params["loss_agg_mode"] == RESPONSE_AGGREGATION
    _check_metrics(case, _run(case, gspo_loss, CLIPS), METRICS)


@pytest.mark.parametrize("case", cases("cispo_loss"))
def test_cispo_loss(case: Case) -> None:
    _check_metrics(case, _run(case, cispo_loss, CLIPS), METRICS)


@pytest.mark.parametrize("case", cases("sapo_loss"))
def test_sapo_loss(case: Case) -> None:
    metrics = _run(case, sapo_loss, {"tau_pos": "tau_pos", "tau_neg": "tau_neg"})
    _check_metrics(case, metrics, {"actor/ppo_kl": "approx_kl"}, absent=(LOWER, "actor/pg_clipfrac"))


def _mean_of_all_rows(case: Case, token_loss: Tensor, mask: Tensor) -> Tensor:
    """What the file does: responses without tokens count in the mean, unlike in every mode of `token_weights`."""
    return (token_loss.sum(1) / mask.sum(1).clamp_min(1)).mean()


@pytest.mark.parametrize("case", cases("gmpo_geo_mean_loss"))
def test_gmpo_loss(case: Case) -> None:
    metrics = _run(case, gmpo_loss, CLIPS, _mean_of_all_rows)
    names = {"actor/pg_clipfrac": "outside_positive_fraction", LOWER: "outside_negative_fraction"}
    _check_metrics(case, metrics, METRICS | names)


@pytest.mark.parametrize("case", cases("dppo_tv_loss"))
def test_dppo_tv_loss(case: Case) -> None:
    _check_metrics(case, _run(case, dppo_tv_loss, {**CLIPS, "c": "c"}), METRICS)


@pytest.mark.parametrize("case", cases("dppo_kl_loss"))
def test_dppo_kl_loss(case: Case) -> None:
    _check_metrics(case, _run(case, dppo_kl_loss, {**CLIPS, "c": "c"}), METRICS)


@pytest.mark.parametrize("case", cases("dro_loss"))
def test_dro_loss(case: Case) -> None:
    _check_metrics(case, _run(case, dro_loss, {"beta": "dro_beta"}), METRICS)


@pytest.mark.parametrize("case", cases("gpg_loss"))
def test_gpg_loss(case: Case) -> None:
    _check_metrics(case, _run(case, lambda logprobs, _, advantages, mask: gpg_loss(logprobs, advantages, mask), {}), {})


def _pairs(case: Case) -> None:
    names = ("policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected")
    chosen, rejected, *references = (case.input(f"{name}_logps") for name in names)
    params = case.params
    refs: list[Any] = [None, None] if params["reference_free"] else references
    chosen.requires_grad_(), rejected.requires_grad_()
    pair_loss, metrics = dpo_loss(
        chosen, rejected, *refs, params["beta"], kind=params["loss_type"], label_smoothing=params["label_smoothing"]
    )
    pair_loss.mean().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    case.check("loss", pair_loss.mean().detach())
    case.check("grad_policy_chosen", chosen.grad)
    case.check("grad_policy_rejected", rejected.grad)
    assert metrics["accuracy"][1].item() == len(chosen)


@pytest.mark.parametrize("case", cases("dpo_loss"))
def test_dpo_loss(case: Case) -> None:
    if "logits" in case.raw:
        labels, logits = case.input("labels").long()[:, 1:], case.input("logits")[:, :-1]
        mask = labels != -100
        logprobs = token_logprobs(logits, labels.clamp_min(0))
        case.check("sum", sequence_logprobs(logprobs, mask, average=False))
        case.check("avg", sequence_logprobs(logprobs, mask, average=True))
    elif "seq_scores" in case.raw:
        scores = case.input("seq_scores")
        groups = torch.arange(len(scores)) // 2
        chosen, rejected = best_and_worst(scores, groups, ties="first")
        mask = torch.zeros(len(scores), dtype=torch.bool).index_fill_(0, chosen, True)
        assert mask.tolist() == case.outputs["chosen_mask"]
        assert (~mask).nonzero()[:, 0].tolist() == rejected.tolist()
        assert [rows.tolist() for rows in best_and_worst(scores, groups)] == [[0, 3], [1, 2]]
    else:
        _pairs(case)
