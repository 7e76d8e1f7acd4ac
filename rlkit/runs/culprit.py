"""Finds what in a trainer cannot be pickled, so that the error can name it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle

_DEPTH = 6


def find_culprit(value: Any, name: str = "trainer") -> str | None:
    """The attribute, item or captured variable that cannot be pickled, as text; None when none is found."""
    return _search(value, name, _DEPTH, set())


def _search(value: Any, name: str, depth: int, seen: set[int]) -> str | None:
    if depth == 0 or id(value) in seen:
        return None
    seen.add(id(value))
    for label, part in _parts(value, name):
        if not _can_be_pickled(part):
            return _search(part, label, depth - 1, seen) or f"{label} ({type(part).__name__})"
    return None


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
    elif hasattr(value, "__code__"):
        function = f"{value.__name__}()"
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            yield f"{key!r}, which {function} uses,", cell.cell_contents
        for key in value.__code__.co_names:
            if key in value.__globals__:
                yield f"{key!r}, which {function} uses,", value.__globals__[key]
    else:
        yield from ((f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items())


class _Sink(io.RawIOBase):
    def write(self, data: Any, /) -> int:
        return len(data)


class _Trial(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles everything but tensors, to nowhere."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return bool, ()
        return super().reducer_override(obj)


def _can_be_pickled(value: Any) -> bool:
    try:
        _Trial(_Sink()).dump(value)
    except Exception:
        return False
    return True
