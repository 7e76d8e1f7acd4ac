"""One frame of `rlkit watch`: a run drawn with rich, for a given width and height."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlkit.cli.charts import BORDER, chart, heading
from rlkit.cli.describe import STATE_STYLES, clean, request_details, setting_text, stage_shares
from rlkit.cli.plot import duration, number, sparkline
from rlkit.cli.view import RunView

_WIDE = 100
_SIDE = 44
_CHART_ROWS = 7


def frame(view: RunView, width: int, height: int, metrics: Sequence[str] = ()) -> RenderableType:
    """The whole dashboard. `metrics` are patterns of what to plot; none takes the most telling ones."""
    layout = Layout()
    top = Layout(header(view), size=5)
    foot = Layout(footer(view), size=1)
    body_height = max(0, height - 6)
    body = (_wide if width >= _WIDE else _narrow)(view, width, body_height, metrics)
    layout.split_column(top, body, foot)
    return layout


def _wide(view: RunView, width: int, height: int, metrics: Sequence[str]) -> Layout:
    """Curves and responses on the left; reward terms, settings and interventions on the right."""
    charts = _chart_rows(height, len(view.key_metrics(metrics))) * _CHART_ROWS
    body, left, right = Layout(), Layout(), Layout(size=_SIDE)
    left.split_column(
        Layout(chart_grid(view, metrics, width - _SIDE, charts // _CHART_ROWS), size=charts),
        Layout(rollouts(view, width - _SIDE, height - charts)),
    )
    right.split_column(
        Layout(rewards(view), size=len(view.weights) + 3),
        Layout(settings(view), size=max(3, (len(_plain_settings(view)) + 1) // 2 + 2)),
        Layout(interventions(view), minimum_size=4),
    )
    body.split_row(left, right)
    return body


def _narrow(view: RunView, width: int, height: int, metrics: Sequence[str]) -> Layout:
    """One column: curves, reward terms, responses, and interventions where there is room."""
    terms = len(view.weights) + 3
    asked = 5 if height >= 30 else 0
    charts = _chart_rows(height - terms - asked, 2) * _CHART_ROWS
    body = Layout()
    body.split_column(
        Layout(chart_grid(view, metrics, width, charts // _CHART_ROWS), size=charts),
        Layout(rewards(view), size=terms),
        *([Layout(interventions(view), size=asked)] if asked else []),
        Layout(rollouts(view, width, height - terms - asked - charts)),
    )
    return body


def _chart_rows(height: int, charts: int) -> int:
    """Rows of charts, two in a row, that leave room for at least one response below."""
    return max(1, min(3, (charts + 1) // 2, (height - 6) // _CHART_ROWS))


def _panel(title: str, body: RenderableType) -> Panel:
    return Panel(body, title=heading(title), title_align="left", border_style=BORDER)


def header(view: RunView) -> Panel:
    """Name, state, progress, pace, and where the last step's time went."""
    state, total = view.state, view.total_steps
    title = Table.grid(expand=True, padding=(0, 2))
    title.add_column(no_wrap=True)
    title.add_column(no_wrap=True)
    title.add_column(ratio=1)
    title.add_column(no_wrap=True, justify="right")
    step = Text.assemble("step ", (str(view.step), "bold"), f" of {total}" if total else "")
    bar = ProgressBar(total=total or 1, completed=view.step if total else 0, complete_style="cyan") if total else ""
    pace = [] if view.seconds_per_step is None else [f"{view.seconds_per_step:.3g} s/step"]
    if view.remaining:
        pace.append(f"{duration(view.remaining)} left")
    title.add_row(Text(f"● {state}", style=STATE_STYLES.get(state, "bold")), step, bar, Text(" · ".join(pace)))
    lines: list[RenderableType] = [title, _stages(view), _facts(view)]
    return _panel(view.name, Group(*lines))


def _stages(view: RunView) -> Text:
    """Shares of the last step's time."""
    line = Text(no_wrap=True, overflow="ellipsis")
    shades = ("cyan", "magenta", "yellow", "green", "blue", "red")
    shown = [(name, share) for name, share in stage_shares(view.spans, view.series) if share >= 0.005]
    for index, (name, share) in enumerate(shown[: len(shades)]):
        line.append("■ ", style=shades[index])
        line.append(f"{name} ")
        line.append(f"{share:.0%}   ", style="bold")
    return line if line.plain else Text("no step finished yet", style="dim")


def _facts(view: RunView) -> Text:
    """The reason of the state or the error of a failed run, else process, checkpoint and memory."""
    if view.state == "failed":
        message = (view.error or {}).get("message") or view.status.get("reason") or "see log.txt"
        return Text(clean(str(message)), style="red", no_wrap=True, overflow="ellipsis")
    parts = [str(view.config.get("algorithm", ""))]
    if view.alive:
        parts.append(f"process {view.status.get('pid', '?')}")
    if view.checkpoint is not None:
        parts.append(f"checkpoint at step {view.checkpoint.get('step')}")
    for name, label in (("memory/actor_gpu_mem_mb", "GPU"), ("memory/process_rss_mb", "memory")):
        if name in view.series:
            parts.append(f"{label} {view.series[name].last / 1024:.1f} GB")
    if reason := str(view.status.get("reason") or ""):
        parts.insert(0, clean(reason))
    return Text(" · ".join(part for part in parts if part), style="dim", no_wrap=True, overflow="ellipsis")


def chart_grid(view: RunView, patterns: Sequence[str], width: int, rows: int) -> RenderableType:
    """Charts of the most telling metrics, two in a row."""
    names = view.key_metrics(patterns)[: 2 * rows]
    if not names:
        return _panel("metrics", Text("appear when the first step is done", style="dim"))
    applied = [int(r["step"]) for r in view.requests if r.get("kind") == "set" and r.get("status") == "applied"]
    each = width // 2
    charts = [chart(name, view.series[name], each, _CHART_ROWS, applied) for name in names]
    return Columns(charts, width=each, padding=0)


def rewards(view: RunView) -> Panel:
    """Each reward term with its weight, its raw mean and its curve."""
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("term", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("weight", justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    table.add_column("", width=12, no_wrap=True)
    for term, weight in view.weights.items():
        series = view.series.get(f"reward/{term}")
        last = number(series.last) if series else ""
        curve = sparkline(series.values, 12) if series else ""
        table.add_row(clean(term), number(float(weight)), last, Text(curve, style="cyan"))
    return _panel("reward terms", table)


def settings(view: RunView) -> Panel:
    """Live settings that are in use, two in a row."""
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in range(2):
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(justify="right", no_wrap=True, style="bold")
    pairs = _plain_settings(view)
    for left, right in zip(pairs[::2], [*pairs[1::2], ("", "")], strict=False):
        table.add_row(*left, *right)
    return _panel("live settings", table)


def _plain_settings(view: RunView) -> list[tuple[str, str]]:
    """Names and values; settings that are off (None) and the weights, which have a panel of their own, are left out."""
    return [
        (clean(str(name)), setting_text(value))
        for name, value in view.settings.items()
        if name != "reward_weights" and value is not None
    ]


def rollouts(view: RunView, width: int, height: int) -> Panel:
    """The responses of the latest step by falling reward; the best and the worst when not all of them fit."""
    found = view.samples()
    if found is None:
        return _panel("responses", Text("appear when the first step is done", style="dim"))
    step, rows = found
    console = Console(width=width - 4)
    blocks = [_response(row).wrap(console, width - 4)[:3] for row in rows]
    room, kept = height - 2, set[int]()
    for index in sorted(range(len(rows)), key=lambda i: min(i, len(rows) - 1 - i)):
        if len(blocks[index]) > room:
            break
        room -= len(blocks[index])
        kept.add(index)
    lines = [line for index, block in enumerate(blocks) if index in kept for line in block]
    title = f"responses of step {step}" + (f", {len(kept)} of {len(rows)}" if len(kept) < len(rows) else "")
    return _panel(title, Group(*lines))


def _response(row: Mapping[str, Any]) -> Text:
    """Reward, prompt and response in one line of text."""
    reward = row.get("reward")
    score = "" if reward is None else f"{number(float(reward)):>7}  "
    prompt, response = clean(str(row.get("prompt", ""))), clean(str(row.get("response", "")))
    return Text.assemble((score, "bold cyan"), (prompt, "dim"), response)


def interventions(view: RunView) -> Panel:
    """What was asked of the run, newest first."""
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for request in reversed(view.requests):
        applied = request.get("status") == "applied"
        status = Text("applied" if applied else "refused", style="green" if applied else "bold red")
        table.add_row(str(request.get("step", "?")), status, request_details(request))
    body: RenderableType = table if view.requests else Text("nothing was asked of this run yet", style="dim")
    return _panel("interventions", body)


def footer(view: RunView) -> Text:
    """How to leave and how to steer."""
    directory = view.reader.folder.root
    return Text.assemble(
        ("q", "bold"),
        " leaves, the run goes on   " if view.alive else " leaves   ",
        (f"rlkit pause|resume|set|stop {directory}", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )
