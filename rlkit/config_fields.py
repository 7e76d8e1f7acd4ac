"""How a configuration class declares its fields: defaults, bounds, docstrings, strict keys.

A field is `name: type = live(default, low=..., high=...)` or `fixed(...)`, with its docstring on the next line.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
from collections.abc import Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Self, cast, get_args, get_origin, get_type_hints

from rlkit.errors import ConfigError

__all__ = ["Checked", "Tunable", "fixed", "live", "refuse_unknown"]


def live(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    aspect: str | None = None,
) -> Any:
    """A live-tunable field with its bounds: `low`/`high` inclusive, `above` exclusive.

    Args:
        aspect: what an algorithm must have for the field to mean something to it; None for every algorithm.
    """
    bounds = {"low": low, "high": high, "above": above}
    return field(default=default, metadata={"live": True, "aspect": aspect, **bounds})


def fixed(default: Any, *, low: float | None = None, high: float | None = None, above: float | None = None) -> Any:
    """A field that cannot change once the trainer is built, with its bounds."""
    return field(default=default, metadata={"live": False, "low": low, "high": high, "above": above})


class Checked:
    """Shared by the configuration classes: strict keys with the nearest name, types and bounds checked on building."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds a configuration from a dictionary.

        Raises:
            ConfigError: a key is unknown (the nearest known name is suggested) or a value is out of range.
        """
        refuse_unknown(values, (f.name for f in dataclasses.fields(cls)), what=cls.__name__)  # type: ignore[arg-type]
        return cls(**values)

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, spec.name, _coerce(type(self), spec, getattr(self, spec.name)))

    @classmethod
    def doc(cls, name: str) -> str:
        """The docstring of one field."""
        return _field_docs(cast(Hashable, cls))[name]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class Tunable(Checked):
    """Settings of which some can change while a run goes on, see `live`."""

    @classmethod
    def live_fields(cls, aspects: Container[str] | None = None) -> tuple[str, ...]:
        """Names of the fields that can change while a run goes on; with `aspects`, those that matter to them."""
        live = [f for f in dataclasses.fields(cls) if f.metadata.get("live")]
        return tuple(
            f.name for f in live if aspects is None or f.metadata["aspect"] is None or f.metadata["aspect"] in aspects
        )

    @classmethod
    def live_specs(cls, aspects: Container[str] | None = None) -> dict[str, dict[str, Any]]:
        """For each of `live_fields` its type ("float" or "int"), bounds (inclusive; None where open) and docstring."""
        hints, names = hints_of(cls), cls.live_fields(aspects)
        specs = {}
        for entry in dataclasses.fields(cls):
            if entry.name in names:
                kind = next(k for k in (int, float) if k is hints[entry.name] or k in get_args(hints[entry.name]))
                low = entry.metadata["above"] if entry.metadata["low"] is None else entry.metadata["low"]
                specs[entry.name] = {
                    "type": kind.__name__,
                    "min": low,
                    "max": entry.metadata["high"],
                    "doc": cls.doc(entry.name),
                }
        return specs

    def replace_live(self, changes: Mapping[str, Any]) -> Self:
        """A copy with some live fields changed; all of them or none.

        Raises:
            ConfigError: a name is unknown or not live, or a value has the wrong type or is out of range.
        """
        live = self.live_fields()
        for name in changes:
            if name not in live:
                known = {f.name for f in dataclasses.fields(self)}
                if name in known:
                    raise ConfigError(f"{name} is fixed once a trainer is built; live settings are {', '.join(live)}")
                refuse_unknown([name], live, what="live setting")
        return dataclasses.replace(self, **changes)


def refuse_unknown(given: Iterable[str], known: Iterable[str], *, what: str) -> None:
    """Raises ConfigError for the first given name that is not known, with the nearest known one."""
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(names))}"
            raise ConfigError(f"unknown {what} key {name!r}{hint}")


def hints_of(cls: type) -> dict[str, Any]:
    """The resolved types of a configuration class's fields."""
    return _hints(cast(Hashable, cls))


@cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return get_type_hints(cls)


def _coerce(cls: type, spec: dataclasses.Field[Any], value: Any) -> Any:
    """Checks one value against the field's type and bounds; whole floats become ints and ints become floats."""
    hint = hints_of(cls)[spec.name]
    options = get_args(hint) if get_origin(hint) not in (None, Literal, dict) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = next(option for option in options if option is not type(None))
    if isinstance(kind, type) and issubclass(kind, Checked) and isinstance(value, Mapping):
        return kind.from_dict(value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{spec.name}={value!r} is none of {', '.join(map(repr, get_args(kind)))}")
        return value
    if kind in (int, float):
        return _number(spec, kind, value)
    plain = get_origin(kind) or kind
    if not isinstance(value, plain):
        raise ConfigError(
            f"{spec.name} must be {getattr(plain, '__name__', plain)}, got {type(value).__name__} {value!r}"
        )
    return value


def _number(spec: dataclasses.Field[Any], kind: type, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value != int(value)):
        raise ConfigError(f"{spec.name} must be {kind.__name__}, got {type(value).__name__} {value!r}")
    number: int | float = kind(value)
    if not math.isfinite(number):
        raise ConfigError(f"{spec.name} must be finite, got {value!r}")
    low, high, above = (spec.metadata.get(key) for key in ("low", "high", "above"))
    if low is not None and number < low:
        raise ConfigError(f"{spec.name}={value!r} is below its least value {low}")
    if high is not None and number > high:
        raise ConfigError(f"{spec.name}={value!r} is above its greatest value {high}")
    if above is not None and number <= above:
        raise ConfigError(f"{spec.name}={value!r} must be above {above}")
    return number


@cache
def _field_docs(cls: Hashable) -> dict[str, str]:
    """The string that stands below each field in the class's source."""
    tree = ast.parse(inspect.getsource(cls))  # type: ignore[arg-type]
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    docs = {}
    for above, below in itertools.pairwise(body):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[ast.unparse(above.target)] = inspect.cleandoc(str(below.value.value))
    return docs
