"""A model's weights under the names of its Hugging Face checkpoint, adapters merged in, the model left as it is."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines.forward import bare_model
from rlkit.errors import GenerationError

__all__ = ["checkpoint_weights"]


def checkpoint_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a model once, layer by layer, as a checkpoint without adapters would hold it.

    Weights are the model's own memory, detached; a layer with an adapter is merged in a copy of that one layer, which
    lives as long as its tensor is referred to. A tensor that two names share (tied embeddings) comes under the first.

    Yields:
        the name, and the tensor on the model's device in the model's dtype.

    Raises:
        GenerationError: an adapter cannot be merged into its layer.
        ModelError: the adapter is no layer of the model (prompt tuning and its kin).
    """
    seen: set[int] = set()
    with torch.no_grad():
        yield from _weights(bare_model(model), "", seen)


def _weights(module: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        adapters = [name for name in module.active_adapters if name in module.modules_to_save]
        trained = module.modules_to_save[adapters[0]] if adapters else module.original_module
        yield from _weights(trained, prefix, seen)
        return
    if hasattr(module, "base_layer") and hasattr(module, "merge"):
        base, module = module.get_base_layer(), _in_force(module, prefix)
        seen = seen if module is base else set()  # a copy lives too briefly for its identity to mean anything
    for name, tensor in _own(module).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield prefix + name, tensor.detach()
    for name, child in module.named_children():
        yield from _weights(child, f"{prefix}{name}.", seen)


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers of one module, without those of its children."""
    saved = {name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return {name: tensor for name, tensor in {**module._parameters, **saved}.items() if tensor is not None}


def _in_force(layer: Any, prefix: str) -> nn.Module:
    """The layer under an adapter with the weights that its forward amounts to: itself where it has them already."""
    wanted = not getattr(layer, "disable_adapters", False)
    if bool(getattr(layer, "merged", False)) != wanted:
        layer = copy.deepcopy(layer)
        try:
            layer.merge() if wanted else layer.unmerge()
        except Exception as error:
            raise GenerationError(
                f"the adapter of {prefix.rstrip('.')} ({type(layer).__name__}) cannot be merged into its layer: "
                f"{error}. vLLM samples from merged weights; take generation='native' for this adapter"
            ) from error
    base = layer.get_base_layer()
    assert isinstance(base, nn.Module)
    return base
