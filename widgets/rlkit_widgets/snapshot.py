"""A static last view beside the live one: plain HTML that a saved notebook shows without a kernel.

It is an output of its own, refreshed now and then under one display id. The live view hides it while it lives. Charts
are an image, so that they also survive in a notebook that is not trusted; its colours read on light and dark paper.
"""

import math
import time
import uuid
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rlkit_widgets.series import Points
from rlkit_widgets.state import RunState

REFRESH_S = 10.0
STRIPS = 6
STRIP_POINTS = 150
HEADLINES = ("kl", "entropy", "loss", "throughput", "length")
"""Words that bring a metric into the view, one metric each, in this order, after the rewards."""
REWARDS_SHOWN = 3
_DULL = ("std", "coef", "fraction", "_ms", "latency")
_WIDTH, _HEIGHT, _GAP, _LABEL = 240, 56, 16, 18
_LINE, _INK = "#0e8ac7", "#808080"


class Snapshot:
    """The static view of one widget.

    Args:
        name: name of the run, for the view before anything was read.
    """

    def __init__(self, name: str) -> None:
        self.identifier = f"rlkit-{uuid.uuid4().hex[:12]}"
        self._name = name
        self._shown = False
        self._drawn_at = 0.0
        self._drawn_state: str | None = None

    def show(self) -> None:
        """Put the view into the output of the running cell. Without a kernel there is nothing to keep."""
        if self._publish(self._wrap(f"<p><b>{escape(self._name)}</b>: no view was kept yet.</p>"), update=False):
            self._shown, self._drawn_at = True, 0.0

    def refresh(self, state: RunState) -> None:
        """Redraw, at most every ten seconds and whenever the run's state changes."""
        now, run_state = time.monotonic(), state.status.get("state")
        if self._shown and (now - self._drawn_at >= REFRESH_S or run_state != self._drawn_state):
            self._drawn_at, self._drawn_state = now, run_state
            self._publish(self._wrap(render(state)), update=True)

    def finish(self, state: RunState) -> None:
        """Draw the last view of a widget that closes."""
        if self._shown:
            self._publish(self._wrap(render(state)), update=True)
            self._shown = False

    def _wrap(self, html: str) -> str:
        return f'<div data-rlkit-snapshot="{self.identifier}">{html}</div>'

    def _publish(self, html: str, update: bool) -> bool:
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is None or not hasattr(shell, "kernel"):
            return False
        data = {"text/html": html, "text/plain": f"run {self._name} (static view)"}
        shell.display_pub.publish(data, transient={"display_id": self.identifier}, update=update)
        return True


def render(state: RunState) -> str:
    """HTML of the view: status line, the leading metrics as small charts with their last values, and the weights."""
    status = state.status
    total = status.get("total_steps")
    progress = f"step {status.get('step', 0)}" + (f" of {total}" if total else "")
    when = time.strftime("%Y-%m-%d %H:%M")
    reason = f" ({escape(str(status['reason']))})" if status.get("reason") else ""
    parts = [
        f"<p><b>{escape(state.name)}</b>: {escape(str(status.get('state', 'starting')))}{reason}, {progress}. "
        f"Static view of {when}; <code>Dashboard({escape(repr(_shown_path(state.folder.root)))})</code> "
        "shows the live one.</p>"
    ]
    names = leading(list(state.series))
    if names:
        parts.append(_charts(state, names))
    weights = state.settings.get("reward_weights") or {}
    if weights:
        listed = ", ".join(f"{escape(str(term))} {weight:g}" for term, weight in weights.items())
        parts.append(f"<p>Reward weights: {listed}</p>")
    return "".join(parts)


def _shown_path(folder: Path) -> str:
    """The folder as one would type it in the notebook: relative where it lies below the working directory."""
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def leading(names: Sequence[str]) -> list[str]:
    """The metrics that a small view shows: the mixed reward and its first terms, then one per headline."""
    telling = [name for name in names if not any(word in name for word in _DULL)]
    rewards = [name for name in telling if name.startswith("reward/")]
    rewards.sort(key=lambda name: name != "reward/mean")
    others = [name for name in telling if name not in rewards]
    firsts = [next((name for name in others if word in name), None) for word in HEADLINES]
    return [*rewards[:REWARDS_SHOWN], *dict.fromkeys(name for name in firsts if name)][:STRIPS]


def _charts(state: RunState, names: Sequence[str]) -> str:
    cells, described = [], []
    for place, name in enumerate(names):
        points = state.series[name].points(STRIP_POINTS)
        left = (place % 3) * (_WIDTH + _GAP)
        top = (place // 3) * (_HEIGHT + _LABEL + _GAP)
        last = _last_finite(points[1].tolist())
        described.append(f"{name} {last}")
        cells.append(
            f'<g transform="translate({left},{top})"><text x="0" y="12">{escape(name)}</text>'
            f'<text x="{_WIDTH}" y="12" text-anchor="end" font-weight="bold">{last}</text>'
            f'<g transform="translate(0,{_LABEL})">{_line(points)}</g></g>'
        )
    rows = -(-len(names) // 3)
    width, height = 3 * (_WIDTH + _GAP) - _GAP, rows * (_HEIGHT + _LABEL + _GAP)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" fill="{_INK}">{"".join(cells)}</svg>'
    )
    source = b64encode(svg.encode()).decode()
    text = escape("Last values: " + "; ".join(described))
    return f'<img alt="{text}" width="{width}" height="{height}" src="data:image/svg+xml;base64,{source}">'


def _line(points: Points) -> str:
    """One strip as an SVG path with a base line; a value that is not finite breaks the line."""
    base = f'<path d="M0 {_HEIGHT}H{_WIDTH}" stroke="{_INK}" stroke-width="0.5"/>'
    steps, values = points[0].tolist(), points[1].tolist()
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return base
    low, high = min(finite), max(finite)
    span = (steps[-1] - steps[0]) or 1.0
    commands, pen = [], "M"
    for step, value in zip(steps, values, strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        x = (step - steps[0]) / span * _WIDTH
        y = _HEIGHT / 2 if high == low else _HEIGHT - 2 - (value - low) / (high - low) * (_HEIGHT - 4)
        commands.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return f'{base}<path d="{"".join(commands)}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>'


def _last_finite(values: Sequence[float]) -> str:
    for value in reversed(values):
        if math.isfinite(value):
            return f"{value:.4g}"
    return "not finite" if len(values) else "none"
