"""Nested state as files: tensors in safetensors, the rest as JSON that points into them.

A state is a tree of dicts, lists and tuples whose leaves are tensors or JSON values. Each distinct tensor is written
once, so tied weights stay tied. In the JSON tree
    {"$tensor": [file, name]}   stands for a tensor,
    {"$tuple": [...]}           for a tuple,
    {"$items": [[key, value]]}  for a dict with keys that are not plain text (the step numbers of an optimizer),
    {"$float": "nan"}           for a number that JSON does not know.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_SUFFIX = ".safetensors"


@dataclass
class PackedState:
    """A state ready to be written."""

    tree: Any
    """The JSON tree."""
    files: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """File name -> tensor name -> contiguous tensor on the CPU. No two share memory."""


def pack(state: Mapping[str, Any], *, private: bool, file: str | None = None) -> PackedState:
    """Take a state apart.

    Args:
        state: the tree; its top-level keys name the tensor files.
        private: copy every tensor, so that training may go on while they are written.
        file: put all tensors into this one file instead.

    Raises:
        CheckpointError: a leaf is neither a tensor nor a JSON value; its path is named.
    """
    packer = _Packer(private, file)
    packed = PackedState(packer.encode(state, ()))
    packed.files = packer.files
    return packed


class _Packer:
    def __init__(self, private: bool, file: str | None) -> None:
        self.files: dict[str, dict[str, torch.Tensor]] = {}
        self._private, self._file = private, file
        self._file_of_part: dict[str, str] = {}
        self._places: dict[tuple[Any, ...], list[str]] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is None or isinstance(value, str | bool | int):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, Mapping):
            items = [(key, self.encode(item, (*path, str(key)))) for key, item in value.items()]
            if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
                return dict(items)
            return {"$items": [[self.encode(key, (*path, "key")), item] for key, item in items]}
        if isinstance(value, list | tuple):
            items_ = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
            return items_ if isinstance(value, list) else {"$tuple": items_}
        if _is_tensor(value):
            return {"$tensor": self._place(value, path)}
        raise CheckpointError(
            f"state[{']['.join(path)}] is a {type(value).__name__}; a state holds tensors and JSON values (text, "
            "numbers, booleans, None, lists, tuples, dicts) only."
        )

    def _place(self, tensor: torch.Tensor, path: tuple[str, ...]) -> list[str]:
        """[file, name] of a tensor, which is put there when it is new."""
        if str(tensor.layout) != "torch.strided" or tensor.device.type == "meta":
            raise CheckpointError(
                f"state[{']['.join(path)}] is a {tensor.layout} tensor on {tensor.device}; only dense ones are saved."
            )
        pointer = tensor.untyped_storage().data_ptr()
        key = (str(tensor.device), pointer, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if pointer and key in self._places:
            return self._places[key]
        file = self._file or self._part_file(path[0])
        tensors = self.files.setdefault(file, {})
        name = unique = ".".join(path[1:] if len(path) > 1 else path)
        number = 1
        while unique in tensors:
            number += 1
            unique = f"{name}#{number}"
        copied = tensor.detach().to("cpu").contiguous()
        shares = copied.untyped_storage().data_ptr() == pointer
        if shares and (
            self._private or pointer in self._storages or copied.untyped_storage().nbytes() != copied.nbytes
        ):
            copied = copied.clone()
        self._storages.add(pointer)
        tensors[unique] = copied
        place = [file, unique]
        if pointer:
            self._places[key] = place
        return place

    def _part_file(self, part: str) -> str:
        if part not in self._file_of_part:
            stem = re.sub(r"[^A-Za-z0-9_-]", "_", part) or "part"
            taken = set(self._file_of_part.values())
            name, number = stem + _SUFFIX, 1
            while name in taken:
                number += 1
                name = f"{stem}_{number}{_SUFFIX}"
            self._file_of_part[part] = name
        return self._file_of_part[part]


def unpack(tree: Any, tensor: Callable[[str, str], torch.Tensor]) -> Any:
    """Put a state together again; `tensor(file, name)` gives each tensor."""
    if isinstance(tree, list):
        return [unpack(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        (key, value), *_ = tree.items()
        if key == "$tensor":
            return tensor(*value)
        if key == "$tuple":
            return tuple(unpack(item, tensor) for item in value)
        if key == "$items":
            return {unpack(name, tensor): unpack(item, tensor) for name, item in value}
        if key == "$float":
            return float(value)
    return {key: unpack(value, tensor) for key, value in tree.items()}


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> int:
    """Write a safetensors file and wait until the disk holds it. Returns its size in bytes. Raises OSError."""
    from safetensors import SafetensorError, serialize_file

    try:
        if tensors:
            from safetensors.torch import save_file

            save_file(tensors, path, metadata=metadata)
        else:  # without torch: a state may have no tensors at all
            serialize_file({}, path, metadata=metadata)
    except SafetensorError as error:
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT):
            if f"os error {number})" in str(error):
                raise OSError(number, os.strerror(number), str(path)) from error
        raise CheckpointError(f"{path.name} could not be written: {error}") from error
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors on the CPU by name, and the metadata. Raises CheckpointError for a missing or damaged file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as stream:
            metadata, names = stream.metadata() or {}, list(stream.keys())
        if not names:
            return {}, metadata
        with safe_open(path, framework="pt", device="cpu") as stream:
            return {name: stream.get_tensor(name) for name in names}, metadata
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def write_frozen(path: Path, state: Mapping[str, Any]) -> None:
    """Write weights that never change into one file that carries its own tree. Raises OSError, CheckpointError."""
    packed = pack(state, private=False, file=path.name)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        tree = json.dumps(packed.tree, allow_nan=False)
        write_tensors(temporary, packed.files.get(path.name, {}), {"tree": tree})
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_frozen(path: Path) -> dict[str, Any]:
    """Inverse of `write_frozen`. Raises CheckpointError for a missing or damaged file."""
    tensors, metadata = read_tensors(path)
    try:
        state = unpack(json.loads(metadata["tree"]), lambda _file, name: tensors[name])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} does not hold the frozen weights of a run.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} does not hold the frozen weights of a run.")
    return state


def fsync_directory(path: Path) -> None:
    """Wait until the disk holds a folder's entries."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
