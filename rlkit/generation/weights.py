"""A model's weights under the names of its Hugging Face checkpoint, adapters merged in, the model left as it is."""

import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines.forward import bare_model
from rlkit.errors import GenerationError

__all__ = ["Checkpoint", "InPlace", "checkpoint_weights"]


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


@dataclass(frozen=True, eq=False)
class InPlace:
    """Weights that are the model's own memory. As long as a model stays as it is, it gives the same object."""

    names: tuple[str, ...]
    tensors: list[Tensor]
    """The model's parameters and buffers themselves, in the order of `names`."""
    nbytes: int


class Checkpoint:
    """The checkpoint weights of one model, to be read again and again while the model learns.

    Walking a model of 24 layers takes Python longer than a GPU needs to copy its weights, so a walk is kept until a
    module, a parameter or a buffer is another, has another name, or has moved. Memory that the weights have left is
    therefore held until they are read again.

    Args:
        model: the model; it is referred to and not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.nbytes = 0
        """Bytes that the last pass over the weights gave."""
        self._walk: _Walk | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See `checkpoint_weights`."""
        self.nbytes = 0
        for name, tensor in checkpoint_weights(self.model):
            self.nbytes += tensor.numel() * tensor.element_size()
            yield name, tensor

    @property
    def last_in_place(self) -> InPlace | None:
        """What `in_place` gave last, without a look at the model, which may have other weights by now."""
        return None if self._walk is None else self._walk.found

    def in_place(self) -> InPlace | None:
        """The weights where they lie; None where an adapter has to be merged in first."""
        if self._walk is None or not self._walk.holds():
            self._walk = _Walk(bare_model(self.model))
        found = self._walk.found
        if found is not None:
            self.nbytes = found.nbytes
        return found


class _Walk:
    """What a walk over a model found, and enough to tell whether another would find the same."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._dicts: list[dict[str, Any]] = [each for m in modules for each in (m._modules, m._parameters, m._buffers)]
        self._sizes = list(map(len, self._dicts))
        self._filled = list(filter(None, self._dicts))  # three in ten, and the only ones with something to read
        self._objects, self._named = self._contents(), self._keys()
        self.found = None if any(map(_is_adapter, modules)) else _in_place(model)
        self._traits = self._read()

    def holds(self) -> bool:
        if list(map(len, self._dicts)) != self._sizes:
            return False
        same = all(map(operator.is_, self._contents(), self._objects))
        return same and self._keys() == self._named and self._read() == self._traits

    def _contents(self) -> list[Any]:
        values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values
        return list(chain.from_iterable(map(values, self._filled)))

    def _keys(self) -> list[str]:
        return list(chain.from_iterable(self._filled))

    def _read(self) -> list[list[Any]]:
        """Where the weights lie, their shapes and strides; another dtype of the same shape lies elsewhere."""
        tensors = self.found.tensors if self.found is not None else []
        reads: tuple[Callable[[Tensor], Any], ...] = (Tensor.data_ptr, Tensor.size, Tensor.stride)
        return [list(map(read, tensors)) for read in reads]


def _in_place(model: nn.Module) -> InPlace:
    names, tensors, seen = [], [], set[int]()
    for prefix, module in model.named_modules():
        for name, tensor in _own(module).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                names.append(f"{prefix}.{name}" if prefix else name)
                tensors.append(tensor)
    return InPlace(tuple(names), tensors, sum(t.numel() * t.element_size() for t in tensors))


def _is_adapter(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") or hasattr(module, "modules_to_save")


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
