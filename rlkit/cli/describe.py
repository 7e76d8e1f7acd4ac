"""Parts of a run in a few words: states, requests, settings, where a step's time went."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from rlkit.cli.plot import number
from rlkit.cli.view import Series

STATE_STYLES = {
    "starting": "bold yellow",
    "running": "bold green",
    "paused": "bold yellow",
    "stopping": "bold yellow",
    "stopped": "bold",
    "finished": "bold green",
    "failed": "bold red",
}


def clean(text: str) -> str:
    """Text that cannot move a terminal's cursor: line ends become ⏎, other control characters a dot."""
    out = []
    for character in text:
        if character == "\n":
            out.append("⏎")
        elif character == "\t":
            out.append(" ")
        elif unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn"):
            out.append("·")
        else:
            out.append(character)
    return "".join(out)


def setting_text(value: Any) -> str:
    """A setting's value: numbers short, mappings as `a 0.5, b 1`."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int | float):
        return number(float(value))
    if isinstance(value, Mapping):
        return ", ".join(f"{clean(str(key))} {setting_text(item)}" for key, item in value.items())
    return clean(str(value))


def request_text(request: Mapping[str, Any]) -> str:
    """What was asked: `set lr=1e-06`, `pause`, `step 3`."""
    kind, args = clean(str(request.get("kind", "?"))), request.get("args")
    if not isinstance(args, Mapping) or not args:
        return kind
    if kind == "step":
        return f"step {args.get('n', '')}".strip()
    return f"{kind} " + " ".join(flat_changes(args))


def flat_changes(changes: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`{"reward_weights": {"brevity": 0.5}}` as `["reward_weights.brevity=0.5"]`."""
    out: list[str] = []
    for key, value in changes.items():
        name = prefix + clean(str(key))
        out += flat_changes(value, f"{name}.") if isinstance(value, Mapping) else [f"{name}={setting_text(value)}"]
    return out


def request_details(request: Mapping[str, Any]) -> Text:
    """`set lr=1e-06  cli`, with the reason when it was refused."""
    line = Text(request_text(request))
    if request.get("source"):
        line.append(f"  {clean(str(request['source']))}", style="dim")
    if request.get("status") != "applied" and request.get("reason"):
        line.append(f"  {clean(str(request['reason']))}", style="red")
    return line


def stage_shares(spans: Sequence[Mapping[str, Any]], series: Mapping[str, Series]) -> list[tuple[str, float]]:
    """Share of the last step's wall time that each stage took, largest first.

    A stage that others ran within counts only the time outside of them, so the shares add up to one at most.
    """
    stretches = [(float(s["start"]), float(s["start"]) + float(s["duration_s"]), str(s["name"])) for s in spans]
    if not stretches:
        return []
    whole = series["train/step_time_ms"].last / 1e3 if "train/step_time_ms" in series else 0.0
    whole = whole or max(end for _, end, _ in stretches) - min(start for start, _, _ in stretches)
    shares: dict[str, float] = {}
    for start, end, name in stretches:
        within = [(a, b) for a, b, _ in stretches if start <= a and b <= end and b - a < end - start]
        shares[name] = shares.get(name, 0.0) + (end - start - _covered(within)) / whole
    return sorted(((clean(name), share) for name, share in shares.items()), key=lambda item: -item[1])


def _covered(stretches: Sequence[tuple[float, float]]) -> float:
    """Length of the union of stretches of time."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(stretches):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
