"""`rlkit lab`: JupyterLab on the example notebooks."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from rlkit.errors import ConfigError


def open_lab(path: Path | None, arguments: list[str]) -> None:
    """Replace this process by JupyterLab, opened on `path`, else on the notebooks of this checkout, else here.

    Raises ConfigError when JupyterLab is not installed or `path` does not exist.
    """
    if find_spec("jupyterlab") is None:
        raise ConfigError("JupyterLab is not installed: pip install 'rlkit-lab[notebook]'")
    if path is not None and not path.exists():
        raise ConfigError(f"{path} does not exist")
    where = path or _notebooks() or Path()
    command = [sys.executable, "-m", "jupyterlab", str(where), *arguments]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    os.execv(command[0], command)


def _notebooks() -> Path | None:
    """The notebooks beside the package, when it is a checkout."""
    folder = Path(__file__).resolve().parents[2] / "notebooks"
    return folder if (folder / "01_quickstart.ipynb").is_file() else None
