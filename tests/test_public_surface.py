"""What users import is pinned in tests/public_surface.txt: names, signatures, methods, settings.

A change there is a change for users: say it in the CHANGELOG. Write the file anew with

    python -m tests.test_public_surface
"""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlkit
from tests.source_tree import lazy_names, modules

SNAPSHOT = Path(__file__).with_name("public_surface.txt")


def describe() -> str:
    """The public surface as text, one name after the other."""
    return "\n".join(line for name in sorted(rlkit.__all__) for line in _lines(name, getattr(rlkit, name))) + "\n"


def _lines(name: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value):
        yield f"{name}: module {value.__name__}"
        for member in sorted(getattr(value, "__all__", None) or _defined_in(value)):
            yield f"    {member}{_signature(getattr(value, member))}"
    elif inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"class {name}({bases}){_signature(value)}"
        yield from (f"    {line}" for line in _members(value))
    elif callable(value):
        yield f"def {name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _members(cls: type) -> Iterator[str]:
    """Fields, properties and methods that are rlkit's own (inherited ones too), in order of name."""
    own: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] in ("rlkit", "rlkit_widgets"):
            own |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    for name, value in sorted(own.items()):
        if isinstance(value, property):
            yield f"{name}: {'property' if value.fset is None else 'settable property'}"
        elif isinstance(value, staticmethod | classmethod) or inspect.isfunction(value):
            kind = "classmethod " if isinstance(value, classmethod) else ""
            yield f"{kind}{name}{_signature(getattr(cls, name))}"


def _signature(value: Any) -> str:
    """The parameters with their defaults, without annotations: those are the type-checker's business."""
    if not callable(value) or (inspect.isclass(value) and issubclass(value, Exception)):
        return ""
    signature = inspect.signature(value)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_default(parameter))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _default(parameter: inspect.Parameter) -> Any:
    """Defaults that print the same in every process."""
    default = parameter.default
    plain = default is inspect.Parameter.empty or isinstance(default, str | int | float | tuple | dict | None)
    return default if plain else _Ellipsis()


class _Ellipsis:
    def __repr__(self) -> str:
        return "..."


def _defined_in(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def test_the_public_surface_is_as_written_down() -> None:
    if describe() == SNAPSHOT.read_text():
        return
    # Names of notebooks or other tests cannot leak in here: compare with what a fresh process sees.
    fresh = subprocess.run(
        [sys.executable, "-c", "from tests.test_public_surface import describe; print(describe(), end='')"],
        cwd=SNAPSHOT.parents[1],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert fresh == SNAPSHOT.read_text(), "if the change is meant: python -m tests.test_public_surface"


def test_every_public_name_is_found_where_the_table_says() -> None:
    lazy = set(lazy_names())
    assert set(lazy_names().values()) <= set(modules())
    assert lazy <= set(rlkit.__all__)
    assert dir(rlkit) == sorted(rlkit.__all__)
    for name in set(rlkit.__all__) - lazy - {"__version__"}:
        assert issubclass(getattr(rlkit, name), rlkit.RlkitError)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'PPOTrainr'"):
        rlkit.PPOTrainr  # noqa: B018


def test_every_error_is_one_of_rlkits() -> None:
    from rlkit import errors

    kinds = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert len(kinds) > 5
    assert all(issubclass(kind, rlkit.RlkitError) for kind in kinds)
    assert {kind.__name__ for kind in kinds} <= set(rlkit.__all__)


def test_a_missing_notebook_package_says_how_to_get_it() -> None:
    program = "import sys; sys.modules['anywidget'] = None; import rlkit; rlkit.Dashboard"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'rlkit-lab[notebook]'" in done.stderr.splitlines()[-1]


if __name__ == "__main__":
    SNAPSHOT.write_text(describe())
