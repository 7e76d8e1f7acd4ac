"""`rlkit ls`: the runs below a folder."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlkit.cli.describe import STATE_STYLES
from rlkit.cli.plot import duration, number, sparkline
from rlkit.cli.view import RunView
from rlkit.runs.handle import list_runs


def show_runs(root: Path) -> None:
    """Print a table of the runs below `root`, newest first. Raises RunError when there is no such folder."""
    console = Console()
    runs = list_runs(root)
    if not runs:
        console.print(f"no runs below {root}")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title, justify in (("run", "left"), ("state", "left"), ("step", "right"), ("reward", "right")):
        table.add_column(title, justify="right" if justify == "right" else "left", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("last sign of life", no_wrap=True)
    for run in runs:
        table.add_row(*_row(run.dir, root.expanduser().absolute()))
    console.print(table)


def _row(folder: Path, root: Path) -> tuple[Text | str, ...]:
    name = folder.name if folder == root else str(folder.relative_to(root))
    view = RunView(folder)
    reward = view.series.get("reward/mean")
    step = f"{view.step}/{view.total_steps}" if view.total_steps else str(view.step)
    ago = duration(float(view.status["heartbeat_age_s"])) + " ago"
    return (
        name,
        Text(view.state, style=STATE_STYLES.get(view.state, "")),
        step,
        number(reward.last) if reward else "",
        Text(sparkline(reward.values, 16) if reward else "", style="cyan"),
        Text(ago, style="dim"),
    )
