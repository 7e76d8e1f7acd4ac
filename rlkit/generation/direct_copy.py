"""Checkpoint weights copied straight into an engine's parameters: one pass over the memory, no loader in between.

An engine that fuses layers holds several weights of a checkpoint one after another in one parameter (queries, keys and
values; gate and up). Where that is all it does to them, a later checkpoint needs no loader: each of its weights goes
to the slice where the first one was found.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rlkit.generation.weights import Checkpoint, InPlace

__all__ = ["DirectCopy", "prove"]

_WIDE = torch.int64


class DirectCopy:
    """Copies checkpoints of one model into an engine's parameters. Made by `prove`.

    Args:
        targets: by the name of a weight, the engine's memory that it goes to, of the weight's shape.
        padding: the engine's memory that no weight goes to and that is zero.
    """

    def __init__(self, targets: Mapping[str, Tensor], padding: Sequence[Tensor]) -> None:
        self._targets, self._padding = dict(targets), list(padding)
        self._known: InPlace | None = None
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []

    def __call__(self, weights: Checkpoint) -> bool:
        """Copies every weight; on a GPU it returns before the copies are done.

        Returns:
            False where names or shapes are not those of the engine, which then holds a part of the weights.
        """
        with torch.no_grad():
            known = weights.in_place()
            done = self._one_by_one(weights) if known is None else self._all_at_once(known)
            for rest in self._padding:
                rest.zero_()
        return done

    def _all_at_once(self, known: InPlace) -> bool:
        if known is not self._known:
            self._known, self._groups = None, []
            if len(known.names) != len(self._targets):
                return False
            groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
            for name, source in zip(known.names, known.tensors, strict=True):
                target = self._targets.get(name)
                if target is None or target.shape != source.shape:
                    return False
                target, source = _widened(target, source)
                targets, sources = groups.setdefault((target.dtype, source.dtype), ([], []))
                targets.append(target)
                sources.append(source)
            self._known, self._groups = known, list(groups.values())
        for targets, sources in self._groups:
            torch._foreach_copy_(targets, sources)
        return True

    def _one_by_one(self, weights: Checkpoint) -> bool:
        """A merged weight lives as long as it is looked at, so that no second model gathers in memory."""
        seen = 0
        for name, source in weights:
            target = self._targets.get(name)
            if target is None or target.shape != source.shape:
                return False
            target.copy_(source)
            seen += 1
        return seen == len(self._targets)


def prove(
    parameters: Mapping[str, Tensor], packed: Mapping[str, Sequence[str]], weights: Checkpoint
) -> DirectCopy | None:
    """A direct copy for an engine that has just loaded these weights in its own way, or None.

    Names say where each weight should be; that it is there, value by value, is the proof. Nothing may be left over: a
    parameter without weights, a weight without a parameter, or rows after the last weight that are not zero.

    Args:
        parameters: the engine's parameters by name.
        packed: by the name of a fused layer, the names of its layers in a checkpoint, in order.
        weights: what was loaded.
    """
    with torch.no_grad():
        shapes = {name: tensor.shape for name, tensor in weights}
        targets: dict[str, Tensor] = {}
        padding: list[Tensor] = []
        for name, parameter in parameters.items():
            parts = next((p for p in _names(name, packed) if all(part in shapes for part in p)), None)
            if parts is None or not _fits(parameter, [shapes[part] for part in parts]):
                return None
            row, memory = 0, parameter.detach()
            for part in parts:
                rows = shapes[part][0] if memory.dim() else 0
                targets[part] = memory.narrow(0, row, rows) if memory.dim() else memory
                row += rows
            if memory.dim() and row < len(memory):
                padding.append(memory[row:])
        if set(targets) != set(shapes) or any(bool(rest.any()) for rest in padding):
            return None
        for name, tensor in weights:
            target = targets[name]
            if target.device != tensor.device or not _keeps(tensor.dtype, target.dtype):
                return None
            if not torch.equal(target, tensor.to(target.dtype)):
                return None
    return DirectCopy(targets, padding)


def _names(parameter: str, packed: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """What a parameter's weights may be called: as itself, or as the layers that one of its modules fuses."""
    yield [parameter]
    path = parameter.split(".")
    for place, component in enumerate(path):
        if component in packed:
            yield [".".join([*path[:place], part, *path[place + 1 :]]) for part in packed[component]]


def _fits(parameter: Tensor, shapes: list[torch.Size]) -> bool:
    if not parameter.is_contiguous():
        return False
    if parameter.dim() == 0:
        return shapes == [parameter.shape]
    alike = all(len(shape) == parameter.dim() and shape[1:] == parameter.shape[1:] for shape in shapes)
    return alike and sum(shape[0] for shape in shapes) <= parameter.shape[0]


def _keeps(given: torch.dtype, held: torch.dtype) -> bool:
    """Whether the engine's dtype is that of the weights or another float of 16 bits or more: others go with a scale."""
    return given == held or (given.is_floating_point and held.is_floating_point and held.itemsize >= 2)


def _widened(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory in words of 8 bytes where both have the same dtype: a GPU then moves more in one request."""
    pair = (target, source)
    if target.dtype != source.dtype or not all(_has_words(tensor) for tensor in pair):
        return pair
    target, source = (tensor.detach().view(-1).view(_WIDE) for tensor in pair)
    return target, source


def _has_words(tensor: Tensor) -> bool:
    size = tensor.element_size()
    divides = tensor.numel() * size % 8 == 0 and tensor.storage_offset() * size % 8 == 0
    return tensor.is_contiguous() and size < 8 and divides and tensor.numel() > 0
