"""A trainer's state: what a checkpoint holds, what is stored once, and how memory is given up and taken back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlkit.config import TrainerConfig
from rlkit.controllers.hosted import HostedController
from rlkit.errors import CheckpointError, RunError

if TYPE_CHECKING:
    from rlkit.trainers.runnable import Runnable


def state_of(trainer: Runnable) -> dict[str, Any]:
    """Everything that training changes: leaves are tensors or plain values."""
    return {
        "global_step": trainer.global_step,
        "settings": {name: getattr(trainer.config, name) for name in TrainerConfig.live_fields()},
        "controllers": {c.name: c.state_dict() for c in trainer.dataflow.controllers},
        **{name: part.state_dict() for name, part in trainer.parts().items()},
    }


def load_state(trainer: Runnable, state: Mapping[str, Any]) -> None:
    """Takes back what `state_of` gave.

    Raises:
        CheckpointError: keys are missing or unknown, or the controllers are not the same.
    """
    parts = trainer.parts()
    _require_keys("trainer", state, {"global_step", "settings", "controllers", *parts})
    trainer.global_step = int(state["global_step"])
    if "prompts" in parts:  # the stage of a curriculum decides which rewards there are
        parts["prompts"].load_state_dict(state["prompts"])
    trainer.settle()
    parts = trainer.parts()
    controllers = {c.name: c for c in trainer.dataflow.controllers}
    _require_keys("controllers", state["controllers"], set(controllers))
    for name, controller in controllers.items():
        controller.load_state_dict(state["controllers"][name])
    for name, part in parts.items():
        part.load_state_dict(state[name])
    trainer.config = trainer.config.replace_live(state["settings"])


def frozen_state_of(trainer: Runnable) -> dict[str, Any]:
    """Weights that never change, by controller."""
    states = {c.name: c.frozen_state_dict() for c in hosted_controllers(trainer)}
    return {name: state for name, state in states.items() if state}


def load_frozen_state(trainer: Runnable, state: Mapping[str, Any]) -> None:
    """Takes back what `frozen_state_of` gave."""
    frozen = {c.name: c for c in hosted_controllers(trainer) if c.frozen_state_dict()}
    _require_keys("frozen weights", state, set(frozen))
    for name, controller in frozen.items():
        controller.load_frozen_state_dict(state[name])


def release_memory(trainer: Runnable) -> None:
    """Drops parameters, gradients and optimizer state; shapes stay, so that `take_memory` can bring them back.

    Buffers stay: they are small, and those that are not saved could not be brought back.
    """
    trainer.learner.release()
    for controller in hosted_controllers(trainer):
        for module in controller.modules().values():
            for parameter in module.parameters():
                parameter.grad = None
                parameter.rlkit_shape = parameter.shape  # type: ignore[attr-defined]
                parameter.data = parameter.data.new_empty(0)
    _return_freed_memory(trainer)


def take_memory(trainer: Runnable) -> None:
    """Makes room for the parameters again; their values are whatever is loaded next."""
    for controller in hosted_controllers(trainer):
        for module in controller.modules().values():
            for parameter in module.parameters():
                shape = getattr(parameter, "rlkit_shape", parameter.shape)
                parameter.data = parameter.data.new_empty(shape)


def require_memory(controller: HostedController) -> None:
    """Raises RunError where a controller's parameters were dropped, because a run owns them."""
    for module in controller.modules().values():
        for parameter in module.parameters():
            if getattr(parameter, "rlkit_shape", parameter.shape) != parameter.shape:
                raise RunError(
                    f"the weights of {controller.name!r} went with its trainer to a run; stop that run and bring them "
                    "back with run.load() before another trainer takes them"
                )


def hosted_controllers(trainer: Runnable) -> list[HostedController]:
    """The trainer's controllers that keep torch modules."""
    return [c for c in trainer.dataflow.controllers if isinstance(c, HostedController)]


def _return_freed_memory(trainer: Runnable) -> None:
    """Hands what was freed back to the system, which allocators else keep for later: CUDA's cache, glibc's arenas."""
    gc.collect()
    if any(controller.device.startswith("cuda") for controller in hosted_controllers(trainer)):
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _require_keys(what: str, given: Mapping[str, Any], expected: set[str]) -> None:
    if set(given) != expected:
        missing, odd = sorted(expected - set(given)), sorted(set(given) - expected)
        raise CheckpointError(f"the state does not fit this trainer's {what}: missing {missing}, unknown {odd}")
