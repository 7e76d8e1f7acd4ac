"""Checkpoint weights copied straight into an engine's parameters: one pass over the memory, no loader in between.

An engine that fuses layers holds several weights of a checkpoint one after another in one parameter (queries, keys and
values; gate and up). Where that is all it does to them, a later checkpoint needs no loader: each of its weights goes
to the slice where the first one was found.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, UntypedStorage

from rlkit.errors import GenerationError
from rlkit.generation.weights import Checkpoint, InPlace

__all__ = ["DirectCopy", "prove"]

_WIDE = torch.int64
_BLOCK = 65_536
"""Elements that one block of a GPU copies in torch's calls with lists."""
_BLOCKS = 198
"""Most blocks that one call starts: 1.5 for each multiprocessor of an H200, where a checkpoint of 0.8 GB takes 0.46 ms
in such calls, 0.52 with 132 or 264 blocks and 0.63 in a single call. Shorter calls also start sooner."""


class DirectCopy:
    """Copies checkpoints of one model into an engine's parameters. Made by `prove`.

    A repeated copy starts before the model has been looked at. What it reads are aliases of the weights that were found
    last, with shapes of their own. They keep their memory alive wherever the weights have gone since; only freeing it
    under them (`storage.resize_`) takes it away, and each call looks at that first. So nothing is read that is not
    there. Whether it is what the model now has is checked while a GPU copies. Where it is not, every weight is looked
    up and copied again, after the first copies on the same stream, and nothing of them stays.

    Args:
        targets: by the name of a weight, the engine's memory that it goes to, of the weight's shape.
        padding: the engine's memory that no weight goes to and that is zero.
    """

    def __init__(self, targets: Mapping[str, Tensor], padding: Sequence[Tensor]) -> None:
        self._targets, self._padding = dict(targets), list(padding)
        self._known: InPlace | None = None
        self._parts: list[_Part] = []

    def __call__(self, weights: Checkpoint) -> bool:
        """Copies every weight; on a GPU it returns before the copies are done.

        Returns:
            False where names or shapes are not those of the engine, which then holds a part of the weights.

        Raises:
            GenerationError: the memory of a weight has been freed.
        """
        with torch.no_grad():
            before = weights.last_in_place
            done = before is not None and before is self._known and self._copy()
            known = weights.in_place()
            if not done or known is not before:
                self._known, self._parts = None, []
                done = self._one_by_one(weights) if known is None else self._all_at_once(known)
            for rest in self._padding:
                rest.zero_()
        return done

    def _copy(self) -> bool:
        return all(map(_Part.copy, self._parts))

    def _all_at_once(self, known: InPlace) -> bool:
        if len(known.names) != len(self._targets):
            return False
        pairs: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for name, weight in zip(known.names, known.tensors, strict=True):
            target = self._targets.get(name)
            if target is None or target.shape != weight.shape:
                return False
            _require_memory(name, weight)
            target, source = _widened(target, weight.detach())
            pairs.setdefault((target.dtype, source.dtype), []).append((target, source))
        self._known, self._parts = known, [part for alike in pairs.values() for part in _parts(alike)]
        return self._copy()

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


class _Part:
    """Copies that one call starts."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._targets, self._sources = [target for target, _ in pairs], [source for _, source in pairs]
        self._storages = [source.untyped_storage() for source in self._sources]
        self._memory = self._look()

    def copy(self) -> bool:
        """False, and nothing is read, where memory of a source is no longer what it was."""
        if self._look() != self._memory:
            return False
        torch._foreach_copy_(self._targets, self._sources)
        return True

    def _look(self) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the memory. A storage owns what lies at its address, or has another."""
        return list(map(UntypedStorage.data_ptr, self._storages)), list(map(UntypedStorage.nbytes, self._storages))


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


def _parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[_Part]:
    """Copies of one kind, in order, in calls of at most `_BLOCKS` blocks; flat tensors that need more are divided."""
    parts: list[list[tuple[Tensor, Tensor]]] = []
    room = 0
    for pair in pairs:
        flat = all(tensor.dim() == 1 for tensor in pair)
        pieces = [torch.split(tensor, _BLOCK * _BLOCKS) if flat else (tensor,) for tensor in pair]
        for target, source in zip(*pieces, strict=True):
            blocks = -(-target.numel() // _BLOCK)
            if not parts or blocks > room:
                parts.append([])
                room = _BLOCKS
            parts[-1].append((target, source))
            room -= blocks
    return [_Part(part) for part in parts]


def _require_memory(name: str, weight: Tensor) -> None:
    last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    needed = (weight.storage_offset() + last + 1) * weight.element_size() if weight.numel() else 0
    if (held := weight.untyped_storage().nbytes()) < needed:
        raise GenerationError(
            f"the weight {name!r} of shape {tuple(weight.shape)} needs {needed} bytes of memory and has {held}: it was "
            "freed, as sharded and offloaded models do between steps; bring the weights back before they are synced"
        )


def _widened(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory in words of 8 bytes where both have the same dtype: a GPU then moves more in one request."""
    pair = (target, source)
    if target.dtype != source.dtype or not all(_has_words(tensor) for tensor in pair):
        return pair
    target, source = (tensor.view(-1).view(_WIDE) for tensor in pair)
    return target, source


def _has_words(tensor: Tensor) -> bool:
    size = tensor.element_size()
    divides = tensor.numel() * size % 8 == 0 and tensor.storage_offset() * size % 8 == 0
    return tensor.is_contiguous() and size < 8 and divides and tensor.numel() > 0
