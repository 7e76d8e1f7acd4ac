"""`rlkit attach`: a short summary of a run, then its events line by line."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rlkit.cli.describe import STATE_STYLES, clean, flat_changes, request_details
from rlkit.cli.plot import duration, number
from rlkit.cli.view import RunView

_KEY_COUNT = 4


def follow(directory: Path, *, summary_only: bool = False, interval_s: float = 0.5) -> None:
    """Print a summary; then, unless `summary_only`, new events until the run is over or Ctrl-C. Only reads."""
    console = Console(highlight=False)
    view = RunView(directory)
    console.print(summary(view), soft_wrap=True)
    if summary_only:
        return
    followed = False
    try:
        while view.alive:
            followed = True
            time.sleep(interval_s)
            for event in view.update():
                if (line := describe_event(event, view)) is not None:
                    console.print(line, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(Text("left; the run goes on", style="dim"))
        return
    if followed:
        console.print(Text(f"{view.state} at step {view.step}", style=STATE_STYLES.get(view.state, "")))


def summary(view: RunView) -> Text:
    """State, progress, key metrics, settings and the last request, on a line each."""
    total = f" of {view.total_steps}" if view.total_steps else ""
    lines = Text.assemble(
        (view.name, "bold"), "  ", (view.state, STATE_STYLES.get(view.state, "")), f"  step {view.step}{total}"
    )
    if view.remaining:
        lines.append(f"  {duration(view.remaining)} left")
    if reason := view.status.get("reason"):
        lines.append(f"\n{'reason':<12}{clean(str(reason))}")
    if view.series:
        lines.append(f"\n{'metrics':<12}{_metrics(view)}")
    if view.settings:
        lines.append(f"\n{'settings':<12}{'  '.join(flat_changes(_set(view.settings)))}")
    if view.requests:
        last = view.requests[-1]
        lines.append(f"\n{'last asked':<12}step {last.get('step')}  {last.get('status')}  ")
        lines.append(request_details(last))
    if view.checkpoint is not None:
        lines.append(f"\n{'checkpoint':<12}step {view.checkpoint.get('step')}")
    return lines


def describe_event(event: dict[str, Any], view: RunView) -> Text | None:
    """One line for an event; None for those that say nothing by themselves."""
    kind = event.get("type")
    line = Text(time.strftime("%H:%M:%S  ", time.localtime(float(event.get("time", 0)))), style="dim")
    line.append(f"step {event.get('step', '?'):<6}", style="not dim")
    if kind == "metrics":
        line.append(_metrics(view), style="not dim")
    elif kind == "request":
        status = str(event.get("status"))
        line.append(f"{status}  ", style="not dim green" if status == "applied" else "not dim bold red")
        line.append(request_details(event))
    elif kind == "state":
        state = str(event.get("state"))
        line.append(state, style=f"not dim {STATE_STYLES.get(state, '')}")
        if event.get("reason"):
            line.append(f"  {clean(str(event['reason']))}", style="not dim")
    elif kind == "checkpoint":
        line.append(f"checkpoint {clean(str(event.get('path', '')))}", style="not dim")
    elif kind == "error":
        line.append(clean(str(event.get("message", ""))), style="not dim red")
    else:
        return None
    return line


def _metrics(view: RunView) -> str:
    """The latest values of the most telling metrics."""
    names: Iterable[str] = view.key_metrics()[:_KEY_COUNT]
    pace = view.seconds_per_step
    parts = [f"{name} {number(view.series[name].last)}" for name in names]
    return "  ".join(parts + ([] if pace is None else [f"{pace:.3g} s/step"]))


def _set(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
