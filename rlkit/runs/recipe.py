"""The recipe of a trainer: everything about it but the numbers that a checkpoint holds anyway.

recipe.pkl holds two pickles: a header of plain values, then the trainer (cloudpickle, so functions and classes of a
notebook cell travel by value). Memory that `state_dict()` or `frozen_state_dict()` covers in full is left out, as a
named placeholder of the same size; views of one storage stay views of one storage, so tied weights stay tied. Every
other tensor travels inside the recipe, since nothing else would bring it back.

A placeholder is marked with a random pattern when the recipe is read. `Recipe.check_filled` looks for the pattern in
every placeholder that the trainer still refers to, so weights that no state brought back are an error and never
garbage. Reading a recipe runs code of whoever wrote it: read only folders that you trust.
"""

from __future__ import annotations

import io
import os
import pickle
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from rlkit.errors import RunError
from rlkit.runs.culprit import find_culprit
from rlkit.runs.storages import Awaited, LeftOut, Loaded, Storages, is_plain, rebuild, set_attributes


def describe_process() -> dict[str, Any]:
    """What a driver needs to import the same modules as this process."""
    return {
        "python": platform.python_version(),
        "sys_path": [entry for entry in sys.path if isinstance(entry, str)],
        "cwd": os.getcwd(),
    }


def dump_recipe(trainer: Any, *states: Mapping[str, Any]) -> bytes:
    """Pickle a trainer without the memory that `states` cover. The trainer is left as it is.

    Raises:
        RunError: something in the trainer cannot leave this process; says where it is.
    """
    buffer = io.BytesIO()
    pickle.dump(describe_process(), buffer)
    try:
        _RecipePickler(buffer, Storages(states)).dump(trainer)
    except RecursionError as error:
        raise RunError("the trainer is nested too deeply to be sent to a background process.") from error
    except Exception as error:
        where = find_culprit(trainer) or "the trainer"
        raise RunError(
            f"{where} cannot be sent to a background process ({type(error).__name__}: {error}). Open files, locks, "
            "connections and widgets cannot travel: create them inside the function that uses them."
        ) from error
    return buffer.getvalue()


class Recipe:
    """A trainer as it came out of a recipe: it awaits its states."""

    def __init__(self, trainer: Any, header: dict[str, Any], awaited: Awaited) -> None:
        self.trainer = trainer
        self.header = header
        self._awaited = awaited

    def check_filled(self) -> None:
        """Raises CheckpointError when memory that the trainer refers to was not brought back by any state."""
        self._awaited.check_filled()


def read_header(path: Path) -> dict[str, Any]:
    """The header alone; nothing of the trainer is imported or run. Raises RunError."""
    try:
        with open(path, "rb") as stream:
            header = _PlainUnpickler(stream).load()
    except FileNotFoundError:
        raise RunError(f"{path} is missing, so the trainer of this run cannot be brought back.") from None
    except (OSError, pickle.UnpicklingError, EOFError) as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(header, dict) or "python" not in header:
        raise RunError(f"{path} is not a recipe of a run.")
    return header


def load_recipe(path: Path) -> Recipe:
    """Read a recipe. Memory that was on a GPU goes to the same one, or to the CPU where there is no such GPU.

    Raises RunError when the file is missing or damaged, a module cannot be imported, or the Python version differs.
    """
    header = read_header(path)
    here, there = platform.python_version().rsplit(".", 1)[0], str(header["python"]).rsplit(".", 1)[0]
    if here != there:
        raise RunError(f"{path} was written by Python {there} and cannot be read by Python {here}; use Python {there}.")
    awaited = Awaited()
    with open(path, "rb") as stream:
        pickle.load(stream)
        try:
            trainer = _RecipeUnpickler(stream, awaited).load()
        except Exception as error:
            raise RunError(f"the trainer in {path} cannot be put together: {type(error).__name__}: {error}") from error
    awaited.settle()
    return Recipe(trainer, header, awaited)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"unexpected {module_name}.{global_name} in the header")


class _RecipePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: io.BytesIO, storages: Storages) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_id(self, obj: Any) -> tuple[int, int, str] | None:
        return (obj.name, obj.nbytes, obj.device) if type(obj) is LeftOut else None

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(obj) not in (torch.Tensor, torch.nn.Parameter) or not is_plain(obj):
            return super().reducer_override(obj)
        made = (
            rebuild,
            (
                self._storages.of(obj),
                type(obj) is torch.nn.Parameter,
                str(obj.dtype).removeprefix("torch."),
                obj.storage_offset(),
                tuple(obj.shape),
                tuple(obj.stride()),
                obj.requires_grad and obj.is_leaf,
            ),
        )
        attributes = dict(vars(obj))
        return (*made, attributes, None, None, set_attributes) if attributes else made


class _RecipeUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, awaited: Awaited) -> None:
        super().__init__(file)
        self._awaited = awaited

    def persistent_load(self, pid: Any) -> Loaded:
        return self._awaited.make(*pid)
