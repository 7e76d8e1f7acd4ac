"""What an update of the policy was made from: its loss and its gradient, taken where the engine gets them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlkit.trainers.base import Trainer


@dataclass
class Updates:
    """Updates of the policy's engine since they are watched.

    Attributes:
        losses: the loss of each update, summed over its micro-batches.
        gradients: the gradient (N,) of each update over all its parameters, before clipping.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


def flat_gradient(parameters: list[torch.nn.Parameter]) -> Tensor:
    """(N,) gradients of the parameters end to end; zeros where there is none."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad.clone()).flatten() for p in parameters])


def watch(trainer: Trainer, parameters: list[torch.nn.Parameter] | None = None) -> Updates:
    """Losses and gradients of the trainer's updates from now on, in the order of `parameters` (all of the policy's)."""
    engine, updates, losses = trainer.learner.engines["policy"], Updates(), []
    watched = list(engine.parameters.values()) if parameters is None else parameters
    backward, step = engine.backward, engine.step

    def watched_backward(loss: Tensor) -> None:
        losses.append(float(loss.detach()))
        backward(loss)

    def watched_step(limit: float) -> float:
        updates.losses.append(sum(losses))
        updates.gradients.append(flat_gradient(watched))
        losses.clear()
        return step(limit)

    engine.backward, engine.step = watched_backward, watched_step  # type: ignore[method-assign]
    return updates


def distance(one: Tensor, other: Tensor) -> float:
    """Relative difference of two gradients."""
    return float((one - other).norm() / other.norm())
