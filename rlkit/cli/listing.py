"""`rlkit ls`: the runs below a folder."""

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlkit.cli.describe import STATE_STYLES
from rlkit.cli.plot import duration, number, sparkline
from rlkit.cli.view import RunView
from rlkit.errors import RunError
from rlkit.runs.layout import is_run

_DEPTH = 3


def list_folders(root: Path) -> list[Path]:
    """Run folders at or below `root`, at most three levels down, in order of name. Runs are not looked into."""
    if is_run(root):
        return [root]
    found: list[Path] = []
    for directory, names, _ in os.walk(root):
        here = Path(directory)
        runs = {name for name in names if is_run(here / name)}
        found += [here / name for name in runs]
        deep = len(here.relative_to(root).parts) >= _DEPTH - 1
        names[:] = [] if deep else [n for n in names if n not in runs and not n.startswith(".")]
    return sorted(found)


def list_runs(root: Path) -> None:
    """Print a table of the runs below `root`. Raises RunError when there is no such folder."""
    if not root.is_dir():
        raise RunError(f"there is no folder {root}; give the folder that holds your runs, as in `rlkit ls runs`")
    console = Console()
    folders = list_folders(root)
    if not folders:
        console.print(f"no runs below {root}")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title, justify in (("run", "left"), ("state", "left"), ("step", "right"), ("reward", "right")):
        table.add_column(title, justify="right" if justify == "right" else "left", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("last sign of life", no_wrap=True)
    for folder in folders:
        table.add_row(*_row(folder, root))
    console.print(table)


def _row(folder: Path, root: Path) -> tuple[Text | str, ...]:
    name = str(folder.relative_to(root)) if folder != root else str(root)
    try:
        view = RunView(folder)
    except RunError as error:
        return name, Text("unreadable", style="red"), "", "", "", Text(str(error), style="dim")
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
