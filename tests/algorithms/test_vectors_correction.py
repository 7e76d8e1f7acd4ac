"""Every case of the reference vectors of rollout correction: weights, masks and the metrics that are means.

The file also has maxima, minima and deviations over rows. A metric here is a sum and a count, so that it can be pooled
over micro-batches, and those have none; the names are listed so that nothing else is passed over.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.correction import Correction, rollout_correction
from tests.algorithms.vectors import Case, cases

LEVELS = {"token": "token", "seq_sum": "sequence-sum", "seq_mean": "sequence-mean", "seq_max": "sequence-max"}
NOT_MEANS = ("_max", "_min", "_std", "_max_deviation")


def _options(params: dict[str, Any]) -> dict[str, Any]:
    bounds = [float(number) for number in str(params["threshold"]).split("_")]
    if "rollout_is" in params:
        bound = {"threshold": bounds[0]} if len(bounds) == 1 else {"icepop": tuple(bounds)}
        return {"weights": params["rollout_is"], "normalise": params["batch_normalize"], **bound}
    level, kind = params["rollout_rs"].rsplit("_", 1)
    # The file's band is one of p_rollout / p_old, the library's is one of p_old / p_rollout, like that of IcePop.
    inverted = tuple(1 / bound for bound in reversed(bounds))
    bound = {"rejection_limit": bounds[0]} if len(bounds) == 1 else {"rejection_band": inverted}
    return {"rejection": LEVELS[level], "rejection_kind": kind, **bound}


def _correct(case: Case, **options: Any) -> Correction:
    columns = (case.input(name) for name in ("old_log_prob", "rollout_log_prob", "response_mask"))
    return rollout_correction(*columns, **options)


@pytest.mark.parametrize("case", cases("rollout_correction"))
def test_rollout_correction(case: Case) -> None:
    options = _options(case.params)
    corrected = _correct(case, **options)
    case.check("mask", corrected.mask)
    if "weights" in case.outputs:
        case.check("weights", corrected.weights)
        plain = _correct(case, **{**options, "normalise": False}).weights
        raw = _correct(case, weights=options["weights"], threshold=None).weights
        known = _gap(case, corrected) | _weights(case, corrected, plain, raw)
    else:
        assert torch.equal(corrected.weights, corrected.mask.double())
        known = _gap(case, corrected) | _rejection(case, corrected)
    for name, wanted in case.outputs["metrics"].items():
        name = name.removeprefix("rollout_corr/")
        if name in known:
            given = torch.as_tensor(known[name], dtype=torch.float64)
            torch.testing.assert_close(given, torch.tensor(wanted, dtype=torch.float64), **case.tolerance, msg=name)
        else:
            assert name.endswith(NOT_MEANS) or "_rs_" in name or "_seq_fraction_" in name, name


def _mean(corrected: Correction, name: str, count: int | None = None) -> Tensor:
    total, number = corrected.metrics[name]
    return total.double() / (number if count is None else count)


def _gap(case: Case, corrected: Correction) -> dict[str, Any]:
    rows = int((case.input("response_mask").sum(1) > 0).sum())
    everyone = len(case.raw["response_mask"])

    def all_rows(name: str, empty: float) -> Tensor:
        """The file counts a response without tokens in these means, as one with the value `empty`."""
        return (corrected.metrics[name][0] + empty * (everyone - rows)) / everyone

    return {
        "kl": _mean(corrected, "rollout_kl"),
        "k3_kl": _mean(corrected, "rollout_k3"),
        "chi2_token": _mean(corrected, "ratio_chi2"),
        "chi2_seq": all_rows("sequence_ratio_chi2", 0.0),
        "training_log_ppl": all_rows("old_log_ppl", 0.0),
        "rollout_log_ppl": all_rows("rollout_log_ppl", 0.0),
        "log_ppl_diff": all_rows("old_log_ppl", 0.0) - all_rows("rollout_log_ppl", 0.0),
        "log_ppl_abs_diff": all_rows("log_ppl_gap", 0.0),
        "training_ppl": all_rows("old_ppl", 1.0),
        "rollout_ppl": all_rows("rollout_ppl", 1.0),
        "ppl_ratio": all_rows("ppl_ratio", 1.0),
    }


def _weights(case: Case, corrected: Correction, plain: Tensor, raw: Tensor) -> dict[str, Any]:
    mask, whole = case.input("response_mask").bool(), case.params["rollout_is"] == "sequence"
    mean, square = _mean(corrected, "weight_mean"), _mean(corrected, "weight_square_mean")
    rows = plain.sum(1) / mask.sum(1).clamp_min(1)
    units = len(mask) if whole else int(mask.sum())
    known = {
        "rollout_is_mean": mean,
        "rollout_is_std": (square - mean**2).sqrt(),
        "rollout_is_eff_sample_size": mean**2 / square,
        "rollout_is_ratio_fraction_high": _mean(corrected, "weight_high_fraction", units),
        "rollout_is_ratio_fraction_low": _mean(corrected, "weight_low_fraction", units),
        "rollout_is_max": (raw if whole else plain)[mask].max(),
        "rollout_is_min": (raw if whole else plain)[mask].min(),
        "rollout_is_seq_mean": rows.mean(),
        "rollout_is_seq_max": rows.max(),
        "rollout_is_seq_min": rows.min(),
        "rollout_is_batch_norm_factor": (plain.sum() / corrected.weights.sum()),
    }
    if "icepop" in _options(case.params):
        known["rollout_is_oob_ratio"] = _mean(corrected, "weight_zeroed_fraction")
    return known


def _rejection(case: Case, corrected: Correction) -> dict[str, Any]:
    name = f"rollout_rs_{case.params['rollout_rs']}"
    tokens, responses = "rejected_token_fraction", "rejected_response_fraction"
    mean = "mean" if case.params["rollout_rs"].startswith("token") else "seq_mean"
    return {
        f"{name}_{mean}": _mean(corrected, "rejection_divergence"),
        f"{name}_masked_fraction": _mean(corrected, tokens),
        f"{name}_seq_masked_fraction": _mean(corrected, responses),
        "rollout_rs_masked_fraction": _mean(corrected, tokens),
        "rollout_rs_seq_masked_fraction": _mean(corrected, responses, len(case.raw["response_mask"])),
    }
