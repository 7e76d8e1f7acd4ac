"""Loads the reference vectors: JSON files of inputs and outputs computed in float64 by independent code.

Their conventions, where they matter: means divide by (count + 1e-8), metrics are such means over tokens, cells outside
the mask are not compared unless they are multiplied out.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.aggregation import token_weights

FOLDER = Path(__file__).with_name("vectors")
COUNT_EPSILON = 1e-8


class Case:
    """One case of a vector file, with tensors in float64."""

    def __init__(self, tolerance: dict[str, Any], case: dict[str, Any]) -> None:
        self.tolerance, self.id, self.params, self.outputs = tolerance, case["id"], case["params"], case["outputs"]
        self.raw = case["inputs"]

    def input(self, name: str) -> Tensor:
        return _tensor(self.raw[name])

    def check(self, name: str, given: Tensor | float, mask: Tensor | None = None) -> None:
        """Compares with output `name` at the file's tolerance, where `mask` is true."""
        wanted = _tensor(self.outputs[name])
        given = torch.as_tensor(given, dtype=torch.float64)
        if mask is not None:
            wanted, given = wanted[mask.bool()], given[mask.bool()]
        torch.testing.assert_close(given, wanted, **self.tolerance)


def _tensor(value: Any) -> Tensor:
    return torch.tensor(_numbers(value), dtype=torch.float64)


def _numbers(value: Any) -> Any:
    return [_numbers(item) for item in value] if isinstance(value, list) else float(value)


def cases(name: str) -> list[Any]:
    """Every case of `vectors/<name>.json` as a pytest parameter."""
    data = json.loads((FOLDER / f"{name}.json").read_text())
    assert data["cases"], name
    return [pytest.param(Case(data["tolerance"], case), id=case["id"]) for case in data["cases"]]


def whole_minibatch(case: Case, mask: Tensor) -> tuple[Tensor, float]:
    """The mask of the whole minibatch that a case's rows are a part of, and the factor on its loss.

    Some cases are one rank's share of a batch with `batch_num_tokens` tokens in `global_batch_size` responses, their
    loss multiplied by the number of ranks because gradients are averaged over them.
    """
    if "global_batch_size" not in case.params:
        return mask, 1.0
    rows = case.params["global_batch_size"] - int((mask.sum(1) > 0).sum())
    tokens = case.params["batch_num_tokens"] - int(mask.sum())
    others = torch.zeros(rows, mask.shape[1], dtype=mask.dtype)
    for token in range(tokens):
        others[token % rows, token // rows] = 1
    return torch.cat([mask, others]), case.params["dp_size"]


def aggregated(case: Case, token_loss: Tensor, mask: Tensor) -> Tensor:
    """The case's loss through weights that belong to the whole minibatch, sliced to the case's rows."""
    whole, factor = whole_minibatch(case, mask)
    length = case.params.get("loss_scale_factor", mask.shape[1])
    weights = token_weights(whole, case.params["loss_agg_mode"], fixed_length=length, dtype=torch.float64)
    return factor * (token_loss * weights[: len(mask)]).sum()
