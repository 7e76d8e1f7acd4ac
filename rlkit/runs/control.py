"""Requests to a run: anyone appends a line to control.jsonl; the driver reads, validates and answers each once."""

from __future__ import annotations

import difflib
import math
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlkit.errors import RequestRefused, RunError
from rlkit.runs.events import plain
from rlkit.runs.layout import RunFolder
from rlkit.runs.log import LineCursor, append_shared, parse_line
from rlkit.runs.protocol import REQUEST_KINDS, REQUEST_SOURCES


@dataclass(frozen=True, slots=True)
class ControlLine:
    """One request as it was read. `problem` is why it cannot be served, "" when its form is right."""

    id: str
    kind: str
    args: dict[str, Any]
    source: str
    problem: str = ""


def send(
    directory: str | os.PathLike[str], kind: str, args: Mapping[str, Any] | None = None, source: str = "python"
) -> str:
    """Append a request to a run's control.jsonl and return its id. It is answered by an event of type "request".

    Raises RunError when the folder is not a run or cannot be written. Whether the request makes sense is for the
    driver to say; non-finite numbers travel as NaN/Infinity and are refused there, with a reason in the journal.
    """
    folder = RunFolder.open(directory)
    if source not in REQUEST_SOURCES:
        raise RunError(f"a request comes from one of {', '.join(REQUEST_SOURCES)}, not {source!r}.")
    id_ = uuid.uuid4().hex[:12]
    record = {"id": id_, "time": time.time(), "kind": kind, "args": _sendable(dict(args or {})), "source": source}
    append_shared(folder.control, record)
    return id_


def _sendable(value: Any) -> Any:
    """Like `plain`, but non-finite numbers stay numbers, so that the driver sees and refuses them."""
    if isinstance(value, Mapping):
        return {str(key): _sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sendable(item) for item in value]
    item = getattr(value, "item", None)
    if callable(item) and not isinstance(value, str | bool | int | float):
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):
            return str(value)
    return value if isinstance(value, float) else plain(value)


class ControlReader:
    """The driver's side: new requests in order, each handed out once, also across restarts of the driver."""

    def __init__(self, folder: RunFolder, answered: Iterable[str] = ()) -> None:
        """`answered`: ids that events.jsonl already holds an answer for."""
        self._cursor = LineCursor(folder.control)
        self._seen = set(answered)

    def poll(self) -> Iterator[ControlLine]:
        """Requests that were not handed out before. A line that cannot be read is named by its place in the file."""
        for offset, raw in self._cursor.lines():
            line = _parse(offset, raw)
            if line.id not in self._seen:
                self._seen.add(line.id)
                yield line


def _parse(offset: int, raw: bytes) -> ControlLine:
    place = f"line@{offset}"
    record = parse_line(raw)
    if record is None:
        text = raw[:80].decode("utf-8", "replace")
        return ControlLine(place, "unreadable", {}, "", f"the line is not a JSON object: {text!r}")
    id_, kind, args = record.get("id"), record.get("kind"), record.get("args", {})
    source = record.get("source", "")
    problem = ""
    if not isinstance(id_, str) or not id_:
        id_, problem = place, f"a request needs an id (text), got {record.get('id')!r}"
    elif kind not in REQUEST_KINDS:
        problem = (
            f"unknown kind of request {kind!r}{_nearest(str(kind), REQUEST_KINDS)}; known: {', '.join(REQUEST_KINDS)}"
        )
    elif not isinstance(args, dict):
        problem = f"args must be an object, got {type(args).__name__}"
    return ControlLine(id_, str(kind), args if isinstance(args, dict) else {"value": args}, str(source), problem)


def _nearest(name: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def step_count(args: Mapping[str, Any]) -> int:
    """The n of a "step" request. Raises RequestRefused."""
    unknown = set(args) - {"n"}
    n = args.get("n", 1)
    if unknown or isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise RequestRefused(f"step takes n, a whole number of at least 1; got {dict(args)!r}")
    return n


def check_changes(changes: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse a "set" request that names an unknown setting or term, or has a value of the wrong type.

    Args:
        changes: what is asked for, e.g. {"lr": 1e-5, "reward_weights": {"brevity": 0.2}}.
        settings: the live settings now. Numbers must be finite; a mapping may be changed in part.

    Raises:
        RequestRefused: names the setting, what was given and what is accepted.
    """
    if not changes:
        raise RequestRefused(f"set takes at least one setting; live settings: {', '.join(settings) or 'none'}")
    for name, value in changes.items():
        if name not in settings:
            raise RequestRefused(
                f"unknown setting {name!r}{_nearest(name, settings)}; live settings: {', '.join(settings) or 'none'}"
            )
        _check_value(name, value, settings[name])


def _check_value(name: str, value: Any, current: Any) -> None:
    if isinstance(current, Mapping):
        if not isinstance(value, Mapping) or not value:
            raise RequestRefused(f"{name} takes a mapping of {', '.join(map(str, current))}; got {value!r}")
        for key, item in value.items():
            if key not in current:
                raise RequestRefused(f"{name} has no {key!r}{_nearest(key, current)}; known: {', '.join(current)}")
            _check_value(f"{name}[{key!r}]", item, current[key])
        return
    if value is None:  # a setting that may be switched off; whether this one may, the trainer says
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestRefused(f"{name} must be a finite number; got {value!r}")
    if isinstance(current, bool) != isinstance(value, bool):
        raise RequestRefused(f"{name} is {type(current).__name__} (now {current!r}); got {value!r}")
    if isinstance(current, int | float) and not isinstance(value, int | float):
        raise RequestRefused(f"{name} must be a number (now {current!r}); got {value!r}")
    if isinstance(current, str) and not isinstance(value, str):
        raise RequestRefused(f"{name} must be text (now {current!r}); got {value!r}")
