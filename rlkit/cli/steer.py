"""Requests to a run from a terminal: sent, and waited for until the run has answered."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.cli.describe import request_text
from rlkit.errors import ConfigError, RequestRefused, RunError
from rlkit.runs.control import send
from rlkit.runs.handle import Run, attach
from rlkit.runs.request import Request


def parse_changes(items: Sequence[str]) -> dict[str, Any]:
    """`["lr=1e-6", "reward_weights.brevity=0.5"]` as `{"lr": 1e-6, "reward_weights": {"brevity": 0.5}}`.

    Values are JSON (numbers, true, false, null); anything else is text. Raises ConfigError for an item without "=" and
    for a name given twice.
    """
    changes: dict[str, Any] = {}
    for item in items:
        name, sign, text = item.partition("=")
        parts = name.strip().split(".")
        if not sign or not all(parts):
            raise ConfigError(f"{item!r} is not name=value, such as lr=1e-6 or reward_weights.brevity=0.5")
        place = changes
        for part in parts[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{name!r} is given both as a value and by its parts")
        if parts[-1] in place:
            raise ConfigError(f"{name!r} is given twice")
        place[parts[-1]] = _value(text.strip())
    return changes


def _value(text: str) -> Any:
    """A JSON value, a number that JSON does not know (.5, inf), None, or the text itself."""
    if text in ("None", "none"):
        return None
    for read in (json.loads, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def request(directory: Path, kind: str, args: Mapping[str, Any], *, timeout_s: float) -> str:
    """Send a request and wait for its answer; returns a line such as `set lr=1e-06: applied at step 12`.

    Raises:
        RunError: the folder is no run, nothing drives it, or no answer came in time.
        RequestRefused: the run refused; the message is its reason.
    """
    run = attach(directory)
    _require_driven(run, kind)
    asked = request_text({"kind": kind, "args": args})
    sent = Request(run, send(run.dir, kind, args, source="cli"), kind, dict(args))
    try:
        sent.wait(timeout_s)
    except RequestRefused as refusal:
        raise RequestRefused(f"{asked} was refused at step {sent.step}: {refusal}") from refusal
    return f"{asked}: applied at step {sent.step}"


def wait_until_over(directory: Path, *, timeout_s: float) -> str:
    """Wait until a run that was asked to stop has ended; returns its last state. RunError when that takes longer."""
    run = attach(directory).wait(timeout_s)
    return f"{run.state} at step {run.step_count}"


def _require_driven(run: Run, kind: str) -> None:
    """RunError unless a driver will read the request."""
    status = run.status
    if status["alive"]:
        return
    where = f"{run.name} is {status['state']} at step {status.get('step')}"
    if status.get("parked"):
        raise RunError(f"cannot {kind}: {where} and nobody drives it now; its trainer goes on where it was started")
    reason = f" ({status['reason']})" if status.get("reason") else ""
    raise RunError(f"cannot {kind}: {where}{reason}, and nothing drives it any more")
