"""The trainer of `toys`, with its numbers in tensors: a tied weight, its momentum and a frozen target."""

from collections.abc import Mapping
from typing import Any

import torch

from tests.runs.toys import TARGET, PlainTrainer


class TorchTrainer(PlainTrainer):
    """Same steps as `PlainTrainer`, by torch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model = torch.nn.Linear(4, 1, bias=False)
        self.model.weight.data = torch.zeros(1, 4)
        self.tied = torch.nn.Linear(4, 1, bias=False)
        self.tied.weight = self.model.weight
        self.target = torch.tensor([TARGET])
        self.momentum = torch.zeros(1, 4)

    def learn(self) -> torch.Tensor:
        self.model.weight.grad = None
        loss = ((self.tied.weight - self.target) ** 2).sum()
        loss.backward()
        assert self.model.weight.grad is not None
        with torch.no_grad():
            self.momentum.mul_(0.9).add_(self.model.weight.grad)
            self.model.weight.sub_(self.momentum, alpha=self.lr)
        return loss

    def numbers(self) -> dict[str, Any]:
        modules = {"model": self.model.state_dict(), "tied": self.tied.state_dict()}
        return {**modules, "momentum": self.momentum}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        self.model.load_state_dict(numbers["model"])
        self.momentum.copy_(numbers["momentum"])

    def frozen_state_dict(self) -> dict[str, Any]:
        return {"target": self.target}

    def load_frozen_state_dict(self, state: Mapping[str, Any]) -> None:
        self.target.copy_(state["target"])

    def release(self, owner: str) -> None:
        self.model.weight.data = torch.empty(0)
        self.target = torch.empty(0)
        self.owner = owner

    def reclaim(self, state: Mapping[str, Any], frozen: Mapping[str, Any]) -> None:
        self.model.weight.data = torch.empty(1, 4)
        self.target = torch.empty(1, 4)
        super().reclaim(state, frozen)
