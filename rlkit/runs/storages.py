"""Tensor memory inside a recipe: what is left out, what travels, and what comes back on the reading side."""

from __future__ import annotations

import gc
import secrets
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from rlkit.errors import CheckpointError

_WORD = 8
_MARKS = 1 << 16


class LeftOut:
    """A storage that a state brings back; pickled by name."""

    def __init__(self, name: int, nbytes: int, device: str) -> None:
        self.name, self.nbytes, self.device = name, nbytes, device


class Inline:
    """A storage that travels inside the recipe."""

    def __init__(self, data: bytes, device: str) -> None:
        self.data, self.device = data, device

    def __reduce__(self) -> Any:
        return load_inline, (self.data, self.device)


class Loaded:
    """A storage on the reading side. `tensors` refers to those built on it, when it awaits a state."""

    def __init__(self, storage: Any, awaited: bool) -> None:
        self.storage = storage
        self.tensors: list[weakref.ref[Any]] | None = [] if awaited else None


class Storages:
    """The writing side: one `LeftOut` or `Inline` per storage, however many tensors view it."""

    def __init__(self, states: tuple[Mapping[str, Any], ...]) -> None:
        """`states`: what will be loaded over the trainer; memory they cover in full is left out."""
        self._covered = covered(states)
        self._known: dict[tuple[str, int], LeftOut | Inline] = {}
        self._kept: list[Any] = []

    def of(self, tensor: Any) -> LeftOut | Inline:
        """The entry of a tensor's storage."""
        storage, device = tensor.untyped_storage(), str(tensor.device)
        # Storages without bytes all have address 0; they are told apart by their own object, kept alive for that.
        key = (device, storage.data_ptr() or -id(storage))
        if key not in self._known:
            self._kept.append(storage)
            if key in self._covered:
                self._known[key] = LeftOut(len(self._known), storage.nbytes(), device)
            else:
                self._known[key] = Inline(_as_bytes(storage).cpu().numpy().tobytes(), device)
        return self._known[key]


def tensors_in(value: Any) -> Iterator[Any]:
    """Every tensor of a nested state."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "untyped_storage"):
        yield value


def covered(states: tuple[Mapping[str, Any], ...]) -> set[tuple[str, int]]:
    """(device, address) of each storage whose every byte is in some tensor of the states."""
    stretches: dict[tuple[str, int], list[tuple[int, int]]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors_in(states):
        if not is_plain(tensor) or not _is_dense(tensor) or not tensor.untyped_storage().nbytes():
            continue
        storage = tensor.untyped_storage()
        key = (str(tensor.device), storage.data_ptr())
        sizes[key] = storage.nbytes()
        start = tensor.storage_offset() * tensor.element_size()
        stretches.setdefault(key, []).append((start, start + tensor.numel() * tensor.element_size()))
    found = set()
    for key, parts in stretches.items():
        reached = 0
        for start, stop in sorted(parts):
            if start > reached:
                break
            reached = max(reached, stop)
        if reached >= sizes[key]:
            found.add(key)
    return found


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is an ordinary view of ordinary memory."""
    import torch

    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _is_dense(tensor: Any) -> bool:
    """Whether the elements fill one stretch of memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _as_bytes(storage: Any) -> Any:
    """All of a storage as a tensor of bytes."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _device(name: str) -> Any:
    """The device of that name, or the CPU where there is no such GPU."""
    import torch

    device = torch.device(name)
    there = device.type != "cuda" or (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count())
    return device if there else torch.device("cpu")


def load_inline(data: bytes, device: str) -> Loaded:
    """Inverse of `Inline`."""
    import torch

    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return Loaded(raw.to(_device(device)).untyped_storage(), awaited=False)


def rebuild(
    loaded: Loaded,
    is_parameter: bool,
    dtype: str,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Any:
    """A tensor on a storage of the reading side. `offset` and `stride` count elements."""
    import torch

    tensor = torch.empty(0, dtype=getattr(torch, dtype), device=loaded.storage.device)
    tensor.set_(loaded.storage, offset, shape, stride)
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
    elif requires_grad:
        tensor.requires_grad_()
    if loaded.tensors is not None:
        loaded.tensors.append(weakref.ref(tensor))
    return tensor


def set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    """Give a rebuilt tensor the Python attributes it had."""
    vars(tensor).update(attributes)


class Awaited:
    """Left-out storages on the reading side: marked with a random pattern until a state is loaded over them.

    Every word of 8 bytes carries the pattern, or evenly spaced ones where there are more than `_MARKS`.
    """

    def __init__(self) -> None:
        self._pattern = secrets.randbits(62) | (1 << 62)
        self._loaded: dict[int, Loaded] = {}
        self._tensors: list[weakref.ref[Any]] = []

    def make(self, name: int, nbytes: int, device: str) -> Loaded:
        """The storage of that name, made on the first call."""
        import torch

        if name not in self._loaded:
            raw = torch.empty(nbytes, dtype=torch.uint8, device=_device(device))
            if nbytes < _WORD:
                raw.copy_(torch.tensor(list(self._pattern_bytes()[:nbytes]), dtype=torch.uint8))
            for words in _marked_words(raw):
                words.fill_(self._pattern)
            self._loaded[name] = Loaded(raw.untyped_storage(), awaited=True)
        return self._loaded[name]

    def settle(self) -> None:
        """Let go of the storages once the trainer holds them."""
        self._tensors = [ref for loaded in self._loaded.values() for ref in loaded.tensors or ()]
        self._loaded = {}

    def check_filled(self) -> None:
        """Raises CheckpointError when a tensor that is still in use has memory that nothing was loaded over."""
        if self._unfilled() is None:
            return
        gc.collect()  # it may belong to something that was dropped, such as the moments of an optimizer
        tensor = self._unfilled()
        if tensor is not None:
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} was not restored: the trainer holds "
                "it, but load_state_dict and load_frozen_state_dict left it as it was. Their state does not fit this "
                "recipe."
            )

    def _unfilled(self) -> Any:
        """A tensor in use whose storage still has the pattern; None when there is none."""
        seen: set[tuple[str, int]] = set()
        for reference in self._tensors:
            tensor = reference()
            if tensor is None or not tensor.untyped_storage().nbytes():
                continue
            storage = tensor.untyped_storage()
            key = (str(tensor.device), storage.data_ptr())
            if key not in seen and self._has_pattern(storage):
                return tensor
            seen.add(key)
        return None

    def _has_pattern(self, storage: Any) -> bool:
        """Whether any marked word is as it was. Storages under 4 bytes could match by chance and are passed."""
        raw = _as_bytes(storage)
        if raw.numel() < _WORD:
            return raw.numel() >= 4 and bytes(raw.tolist()) == self._pattern_bytes()[: raw.numel()]
        return any(bool((words == self._pattern).any()) for words in _marked_words(raw))

    def _pattern_bytes(self) -> bytes:
        return self._pattern.to_bytes(_WORD, sys.byteorder)


def _marked_words(raw: Any) -> Iterator[Any]:
    """The words of a storage that carry the pattern, as views."""
    import torch

    words = raw[: raw.numel() // _WORD * _WORD].view(torch.int64)
    if words.numel():
        yield words[:: max(1, words.numel() // _MARKS)]
        yield words[-1:]
