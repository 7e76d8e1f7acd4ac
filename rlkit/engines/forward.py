"""How rlkit calls a language model: one place that knows what a forward accepts and where its output head is.

Works on transformers causal language models, on the same with `peft` adapters injected, and on plain modules whose
forward takes `input_ids`, `attention_mask` and `position_ids` (whichever of the last two it names) and returns logits
(a tensor, or an object or dict with `logits`).
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.errors import ModelError

__all__ = [
    "bare_model",
    "cache_argument",
    "call_logits",
    "device_of",
    "evaluation_mode",
    "forward_arguments",
    "logits_of",
    "output_head",
    "position_ids_from_mask",
]


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Positions counted over attended tokens only, so that padding never shifts them.

    Args:
        attention_mask: (B, L) bool or int, true at real tokens.

    Returns:
        (B, L) int64; the first real token of a row has position 0, padding left of it 0 as well.
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)


def bare_model(model: nn.Module) -> nn.Module:
    """The module whose forward is called: a `peft` wrapper is taken off, its injected adapter layers stay in force.

    Raises:
        ModelError: for adapters that are not layers of the model (prompt tuning and its kin).
    """
    unwrap = getattr(model, "get_base_model", None)
    if unwrap is None:
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ModelError(
            f"{type(model).__name__} uses a prompt-learning adapter, which changes the input rather than the layers; "
            "use an adapter made of layers, such as LoRA"
        )
    base: nn.Module = unwrap()
    return base


def forward_arguments(model: nn.Module) -> tuple[frozenset[str], bool]:
    """Names of the parameters of `model.forward`, and whether it takes further keywords (`**kwargs`)."""
    parameters = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return frozenset(parameters), open_ended


_CACHE_ARGUMENTS = ("cache", "past_key_values")  # the newer and the older name in transformers


def cache_argument(model: nn.Module) -> str | None:
    """Name under which the forward takes a key-value cache; None for a module that takes none."""
    if not hasattr(model, "config"):
        return None
    names, _ = forward_arguments(model)
    return next((name for name in _CACHE_ARGUMENTS if name in names), None)


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that turns hidden states into logits, or None when the model does not say which one that is."""
    get = getattr(bare_model(model), "get_output_embeddings", None)
    head = get() if get is not None else None
    return head if isinstance(head, nn.Module) else None


def call_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, **optional: Any) -> Tensor:
    """One forward with positions from the mask.

    Args:
        model: a causal language model, see the module's text.
        input_ids: (B, L) int64.
        attention_mask: (B, L) bool, true at real tokens.
        optional: further arguments (`use_cache`, `logits_to_keep`, ...), each passed only if the forward names it.

    Returns:
        (B, L, V) logits, or fewer positions where `logits_to_keep` was given and is supported.
    """
    target = bare_model(model)
    names, open_ended = forward_arguments(target)
    arguments = {
        "attention_mask": attention_mask.long(),
        "position_ids": position_ids_from_mask(attention_mask),
        **optional,
    }
    passed = {key: value for key, value in arguments.items() if key in names}
    if open_ended and "attention_mask" not in names:  # a thin wrapper that hands everything on
        passed = arguments
    return logits_of(target(input_ids, **passed), target)


def logits_of(output: Any, model: nn.Module) -> Tensor:
    """(B, L, V) logits from whatever a forward returned.

    Raises:
        ModelError: there are none.
    """
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", output)
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        output = output[0]
    if not isinstance(output, Tensor) or output.dim() != 3:
        raise ModelError(
            f"{type(model).__name__}.forward returned {type(output).__name__}; expected logits of shape "
            "(batch, positions, vocabulary), as a tensor or under the name 'logits'"
        )
    return output


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and its kin off; afterwards every submodule has the mode it had, also when it was mixed."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter (cpu for a module without any)."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
