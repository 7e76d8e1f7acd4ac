"""Finds the trainer that a user's Python file makes."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlkit.errors import ConfigError, RlkitError


class ScriptError(RlkitError):
    """The user's file raised; the message is the traceback from that file on."""


def execute(path: Path, arguments: Sequence[str] = ()) -> ModuleType:
    """Run a file as a module (so an `if __name__ == "__main__"` part does not run) and return it.

    Its folder is importable, as with `python FILE`, and what it defines travels to a background process by value.

    Raises:
        ConfigError: there is no such Python file.
        ScriptError: the file raised something that is no RlkitError.
    """
    path = path.expanduser().absolute()
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"{path} is not a Python file; give the script that makes a trainer")
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"rlkit_script_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be read as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *arguments]
    _guarded(spec.loader.exec_module, module, file=path)

    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    return module


def find_trainer(module: ModuleType, name: str | None = None) -> Any:
    """The trainer of a script: the only trainer object in it, else what its only trainer-making function returns.

    Args:
        name: the object, or the function without arguments that makes it, when there are several.

    Raises:
        ConfigError: there is none, there are several, or `name` is neither.
    """
    if name is not None:
        return _named(module, name)
    objects = {id(value): (key, value) for key, value in vars(module).items() if is_trainer(value)}
    if len(objects) == 1:
        return next(iter(objects.values()))[1]
    if objects:
        names = ", ".join(key for key, _ in objects.values())
        raise ConfigError(f"{_file(module)} holds several trainers ({names}); choose one with --trainer NAME")
    makers = [key for key, value in vars(module).items() if _makes_trainer(key, value, module)]
    if len(makers) == 1:
        return _named(module, makers[0])
    if makers:
        raise ConfigError(
            f"{_file(module)} has several functions that make a trainer ({', '.join(makers)}); choose one with "
            "--trainer NAME"
        )
    raise ConfigError(
        f"{_file(module)} has no trainer: assign one to a name (trainer = PPOTrainer(...)) or write a function "
        "without arguments that returns one, and name it with --trainer NAME unless its name has 'trainer' in it"
    )


def is_trainer(value: Any) -> bool:
    """Whether something can be started as a run: an object, not a class, with `start`, `train` and `step`."""
    return not inspect.isclass(value) and all(
        callable(getattr(value, name, None)) for name in ("start", "train", "step")
    )


def _named(module: ModuleType, name: str) -> Any:
    value = getattr(module, name, None)
    if value is None:
        raise ConfigError(f"{_file(module)} has no {name!r}")
    if is_trainer(value):
        return value
    if not _takes_nothing(value):
        raise ConfigError(f"{name!r} in {_file(module)} is neither a trainer nor a function without arguments")
    made = _guarded(value, file=Path(_file(module)))
    if not is_trainer(made):
        raise ConfigError(f"{name}() in {_file(module)} returned {type(made).__name__}, which is no trainer")
    return made


def _makes_trainer(name: str, value: Any, module: ModuleType) -> bool:
    """Whether a function of the script itself makes a trainer, by its name or by what it says it returns."""
    if not inspect.isfunction(value) or value.__module__ != module.__name__ or not _takes_nothing(value):
        return False
    returns = inspect.signature(value).return_annotation
    says = returns if isinstance(returns, str) else getattr(returns, "__name__", "")
    return "trainer" in name.lower() or says.endswith("Trainer")


def _takes_nothing(value: Any) -> bool:
    """Whether something can be called without arguments."""
    if not callable(value) or inspect.isclass(value):
        return False
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError):
        return False
    return True


def _guarded(call: Callable[..., Any], *args: Any, file: Path) -> Any:
    """Call the user's code. Its own errors keep their traceback, without the frames above the user's file."""
    try:
        return call(*args)
    except RlkitError:
        raise
    except Exception as error:
        frames = traceback.TracebackException.from_exception(error)
        inside = [i for i, frame in enumerate(frames.stack) if frame.filename == str(file)]
        frames.stack = traceback.StackSummary.from_list(list(frames.stack)[inside[0] if inside else 0 :])
        raise ScriptError(f"{file} failed\n" + "".join(frames.format()).rstrip()) from error


def _file(module: ModuleType) -> str:
    return str(module.__file__)
