"""What a widget may be given as its run."""

from os import PathLike, fspath
from typing import Protocol, runtime_checkable

from rlkit.runs.layout import RunFolder


@runtime_checkable
class HasFolder(Protocol):
    """Anything with a run folder: `rlkit.Run` is one."""

    @property
    def dir(self) -> str | PathLike[str]: ...


RunLike = HasFolder | PathLike[str] | str


def run_folder(run: RunLike) -> RunFolder:
    """Folder of a run handle or path.

    Raises:
        TypeError: `run` is neither a handle nor a path.
        rlkit.RunError: the folder does not exist or is not a run folder.
    """
    if isinstance(run, str | PathLike):
        return RunFolder.open(fspath(run))
    if isinstance(run, HasFolder):
        return RunFolder.open(run.dir)
    raise TypeError(
        f"a widget shows a run: give a Run or the path of its folder, not {type(run).__name__}. "
        "trainer.start(folder) and rlkit.attach(folder) return a Run"
    )
