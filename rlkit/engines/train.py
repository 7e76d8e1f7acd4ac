"""Gradients to weights: accumulate, clip, update, and leave an update out when a gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines.masters import MASTER, MasterWeights
from rlkit.errors import CheckpointError, ConfigError, ModelError, RlkitError

__all__ = ["Group", "TrainEngine", "adamw"]

Rate = Callable[[], float]


class NonFiniteGradientsError(RlkitError, RuntimeError):
    """Too many updates in a row had gradients that are not finite."""


@dataclass(frozen=True)
class Group:
    """Parameters of one module that share a learning rate.

    Attributes:
        name: prefix of the parameters' names in the state, unique in an engine.
        module: its parameters with `requires_grad` are trained.
        optimizer: an optimizer a user built on them, taken over with its settings; None gives AdamW.
        role: whose learning rate it takes; empty takes the name.
    """

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    role: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", self.role or self.name)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name, each once however many names it has."""
        return {f"{self.name}.{n}": p for n, p in self.module.named_parameters() if p.requires_grad}


class TrainEngine:
    """Updates the parameters of one or more groups together.

    Dropout and its kin are the caller's business; the engine only sees losses. State is keyed by parameter name, so
    that it fits the same model wherever it lives.

    Parameters in half precision are working copies: the optimizer updates float32 master weights, gradients of
    micro-batches add up in float32, and each update rounds the masters into the parameters (Micikevicius et al. 2018,
    arXiv:1710.03740). Rounding in place would lose every update below 0.4% of a weight.

    Args:
        groups: what is trained. The first group's optimizer decides the algorithm.
        weight_decay: of AdamW, where no optimizer was given.
        max_bad_steps: consecutive updates with non-finite gradients after which `step` raises.

    Raises:
        ModelError: nothing to train, or an optimizer that holds other parameters than its group.
    """

    def __init__(self, groups: list[Group], weight_decay: float = 0.0, max_bad_steps: int = 3) -> None:
        self.groups = groups
        self.parameters = {name: p for group in groups for name, p in group.parameters().items()}
        if not self.parameters:
            raise ModelError("no parameter of the model is to be trained (requires_grad is off everywhere)")
        self.masters = MasterWeights(self.parameters)
        self.optimizer = _rebuilt_optimizer(groups, weight_decay, self.masters)
        self.max_bad_steps = max_bad_steps
        self.bad_steps = 0
        self.skipped = 0

    def set_lr(self, rates: Mapping[str, float]) -> None:
        """Learning rate of each group by name. A user's parameter groups keep their ratios to the largest."""
        for options in self.optimizer.param_groups:
            options["lr"] = rates[options["rlkit_group"]] * options["rlkit_share"]

    def clear(self) -> None:
        """Drops gradients that are there already, from training before this or from an update that was given up."""
        self.optimizer.zero_grad(set_to_none=True)
        self.masters.drop_gradients()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a micro-batch's loss to those already there."""
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self.masters.take_gradients()

    def step(self, max_grad_norm: float) -> float:
        """Clips, updates and clears the gradients; returns their norm before clipping.

        With a NaN or an infinity among them nothing is updated: weights and optimizer state stay as they were.

        Raises:
            NonFiniteGradientsError: it was the `max_bad_steps`-th time in a row.
        """
        trained = [self.masters.of(p) for p in self.parameters.values()]
        gradients = [p.grad for p in trained if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        total = float(norm)
        if math.isfinite(total):
            if total > max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(trained, max_grad_norm, norm)
            self.masters.follow_parameters()
            self.optimizer.step()
            self.masters.round()
            self.bad_steps = 0
        else:
            self.bad_steps += 1
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.bad_steps >= self.max_bad_steps:
            raise NonFiniteGradientsError(
                f"{self.bad_steps} updates in a row had non-finite gradients (norm {total}) and were left out; the "
                "weights are those before them. Lower the learning rate or look at the rewards, then go on"
            )
        return total

    def state_dict(self) -> dict[str, Any]:
        """{"optimizer": {parameter name: {slot: tensor}}, "bad_steps", "skipped"}.

        Every trained parameter has an entry, empty until its first update; one in half precision has its master weight
        there. The tensors are those in use, not copies.
        """
        self.masters.follow_parameters()
        slots = {
            name: {**self.optimizer.state.get(self.masters.of(p), {}), **self.masters.slot(p)}
            for name, p in self.parameters.items()
        }
        return {"optimizer": slots, "bad_steps": self.bad_steps, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back copies of what `state_dict` gave; nothing changes if it does not fit.

        Raises:
            CheckpointError: keys, parameter names or shapes do not fit.
        """
        if set(state) != {"optimizer", "bad_steps", "skipped"}:
            raise CheckpointError(f"an engine's state holds optimizer, bad_steps and skipped, got {sorted(state)}")
        given: Mapping[str, Mapping[str, Any]] = state["optimizer"]
        if odd := sorted(set(given) ^ set(self.parameters)):
            raise CheckpointError(
                f"the optimizer state is for other parameters: {len(odd)} names differ, first {odd[0]!r}"
            )
        for name, slots in given.items():
            self._require_shape(name, slots)
        # The optimizer takes state by position; it knows on which device and in which dtype each slot belongs.
        layout = self.optimizer.state_dict()["param_groups"]
        positions = {
            id(p): index
            for options, held in zip(layout, self.optimizer.param_groups, strict=True)
            for index, p in zip(options["params"], held["params"], strict=True)
        }
        by_position = {}
        for name, slots in given.items():
            own = {slot: _copy(value) for slot, value in slots.items() if slot != MASTER}
            if own:
                by_position[positions[id(self.masters.of(self.parameters[name]))]] = own
        self.optimizer.load_state_dict({"state": by_position, "param_groups": layout})
        self.masters.load({name: slots.get(MASTER) for name, slots in given.items()}, self.parameters)
        self.bad_steps, self.skipped = int(state["bad_steps"]), int(state["skipped"])

    def _require_shape(self, name: str, slots: Mapping[str, Any]) -> None:
        expected = self.parameters[name].shape
        for slot, value in slots.items():
            if isinstance(value, Tensor) and value.dim() == len(expected) and value.shape != expected:
                raise CheckpointError(
                    f"{slot} of {name!r} has shape {tuple(value.shape)} in the state, the parameter {tuple(expected)}"
                )

    def release(self) -> None:
        """Drops optimizer state, master weights and gradients; they come back with `load_state_dict`."""
        self.optimizer.state.clear()
        self.clear()
        self.masters.release()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _rebuilt_optimizer(groups: list[Group], weight_decay: float, masters: MasterWeights) -> torch.optim.Optimizer:
    """One optimizer over all groups' master weights, with the class and settings of the users' own where given.

    Raises:
        ModelError: a user's optimizer holds other parameters than its group's module.
        ConfigError: users' optimizers of two groups are of different classes.
    """
    given = [group.optimizer for group in groups if group.optimizer is not None]
    if len({type(optimizer) for optimizer in given}) > 1:
        raise ConfigError("optimizers of parts that are trained together must be of one class")
    options: list[dict[str, Any]] = []
    for group in groups:
        options += _options(group, weight_decay)
    for held in options:
        held["params"] = [masters.of(p) for p in held["params"]]
    cls: Any = type(given[0]) if given else torch.optim.AdamW
    return cls(options)  # type: ignore[no-any-return]


def _options(group: Group, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for the optimizer's constructor."""
    parameters = group.parameters()
    mark = {"rlkit_group": group.name, "rlkit_share": 1.0}
    if group.optimizer is None:
        return [{"params": list(parameters.values()), **adamw(weight_decay), **mark}]
    held = {id(p) for options in group.optimizer.param_groups for p in options["params"]}
    if missing := [name for name, p in parameters.items() if id(p) not in held]:
        raise ModelError(
            f"the optimizer holds {len(held)} parameters but not {missing[0]!r}; build it on model.parameters() of the "
            "model the controller is given"
        )
    top = max(float(options["lr"]) for options in group.optimizer.param_groups) or 1.0
    trained = {id(p) for p in parameters.values()}
    rebuilt = []
    for options in group.optimizer.param_groups:
        kept = [p for p in options["params"] if id(p) in trained]
        if kept:
            rebuilt.append({**options, "params": kept, **mark, "rlkit_share": float(options["lr"]) / top})
    return rebuilt


def adamw(weight_decay: float) -> dict[str, Any]:
    """AdamW's settings where no optimizer was given; the fused kernel, which is the fastest on CPU and GPU."""
    return {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay, "fused": True}
