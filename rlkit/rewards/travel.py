"""How a reward function gets into another process."""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

__all__ = ["pickled"]


def pickled(fn: Callable[..., Any]) -> bytes:
    """The function as bytes, with what it uses of its own module rather than with the module's name.

    So the other process runs what this one holds (a reloaded module, an edited cell), and imports only what the
    function needs. A module of the standard library or of an installed package is named; so is one that holds things
    which cannot be pickled.

    Raises:
        Exception: neither way works; whatever the pickler raises.
    """
    module = _own_module(fn)
    if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return bytes(cloudpickle.dumps(fn))
    cloudpickle.register_pickle_by_value(module)
    try:
        with suppress(Exception):  # the other way below says why, if it fails too
            return bytes(cloudpickle.dumps(fn))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return bytes(cloudpickle.dumps(fn))


def _own_module(fn: Any) -> ModuleType | None:
    """The module that the function was written in, if it is one of the user's."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    target = fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn)
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":  # of the main module all goes by value already
        return None
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return None if any(folder in Path(file).parents for folder in installed) else module
