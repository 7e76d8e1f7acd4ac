"""Makes room for a new run where one of that name is: ends it if it still goes on, and keeps its folder aside."""

from __future__ import annotations

import os
from pathlib import Path

from rlkit.runs.handle import Run
from rlkit.runs.layout import is_run


def set_aside(directory: str | os.PathLike[str]) -> Path | None:
    """Stops the run in a folder, if one is there, and renames the folder to the first free `<name>.1`, `<name>.2`, ...

    Returns:
        Where the earlier run is now; None when there was none.
    """
    root = Path(directory).expanduser().absolute()
    if not root.is_dir() or not is_run(root):
        return None
    run = Run(root)
    if run.alive:
        run.stop()
    number = 1
    while (aside := root.with_name(f"{root.name}.{number}")).exists():
        number += 1
    root.rename(aside)
    return aside
