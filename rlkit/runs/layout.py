"""Where things are in a run folder, and the small files that are replaced as a whole.

config.json  dataflow.json  status.json        what was asked; pid, heartbeat, state
events.jsonl  control.jsonl                    the driver's log; requests to the driver
rollouts/step_000120.parquet                   one table a step
checkpoints/step_000100/                       see `checkpoint`
recipe.pkl  frozen.safetensors                 the trainer without its tensors; weights that never change
driver.lock  log.txt                           held by the process that drives; its output
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlkit.errors import RunError

_OWN_NAMES = frozenset(
    {
        "config.json",
        "dataflow.json",
        "status.json",
        "events.jsonl",
        "control.jsonl",
        "rollouts",
        "checkpoints",
        "recipe.pkl",
        "frozen.safetensors",
        "driver.lock",
        "log.txt",
    }
)
_STATUS_BYTES = 4096
_STARTING_S = 60.0


def write_atomic(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Replace a file as a whole: readers see the old content or the new, never a part. Raises OSError."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} when the file is missing or is not a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. `RunFolder.open` checks that it is a run, `RunFolder.create` that it is not one yet."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def dataflow(self) -> Path:
        return self.root / "dataflow.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def control(self) -> Path:
        return self.root / "control.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.pkl"

    @property
    def frozen(self) -> Path:
        return self.root / "frozen.safetensors"

    @property
    def lock(self) -> Path:
        return self.root / "driver.lock"

    @property
    def log(self) -> Path:
        return self.root / "log.txt"

    def rollouts_of(self, step: int) -> Path:
        """The table of one step."""
        return self.rollouts / f"step_{step:06d}.parquet"

    def relative(self, path: Path) -> str:
        """`path` as events name it."""
        return path.relative_to(self.root).as_posix()

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> RunFolder:
        """An existing run. Raises RunError that says what was found instead."""
        root = Path(directory).expanduser().absolute()
        folder = cls(root)
        if not root.exists():
            raise RunError(
                f"there is no run folder at {root}. Give the folder that trainer.start(dir) was called with."
            )
        if not root.is_dir():
            raise RunError(f"{root} is a file, not a run folder.")
        if not folder.config.is_file() or not folder.status.is_file():
            raise RunError(
                f"{root} is not a run folder: it has no config.json and status.json of a run; {_found(root)}."
            )
        return folder

    @classmethod
    def create(cls, directory: str | os.PathLike[str]) -> RunFolder:
        """An empty folder for a new run; made when missing. Raises RunError when it holds anything else.

        A folder whose earlier run never came up is cleared and used again.
        """
        root = Path(directory).expanduser().absolute()
        folder = cls(root)
        if root.exists() and not root.is_dir():
            raise RunError(f"{root} is a file; give a folder for the run.")
        root.mkdir(parents=True, exist_ok=True)
        if folder.config.exists() or folder.status.exists():
            status = read_json(folder.status)
            starting = status.get("state") != "failed" and time.time() - status.get("heartbeat", 0.0) < _STARTING_S
            if not status or status.get("came_up", True) or starting:
                raise RunError(
                    f"{root} already holds a run ({status.get('state', 'state unknown')} at step "
                    f"{status.get('step', '?')}). Start in another folder, or use rlkit.attach({str(directory)!r}) "
                    "to watch or load the one that is there."
                )
        else:
            strangers = sorted(set(os.listdir(root)) - {"driver.lock", "log.txt"})
            if strangers:
                raise RunError(f"{root} is not empty and not a run; {_found(root)}. Start in a new or an empty folder.")
        return folder

    def clear(self) -> None:
        """Remove what a run that never came up has left. Only files that a run writes are touched."""
        import shutil

        for name in _OWN_NAMES - {"driver.lock"}:
            path = self.root / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _found(root: Path) -> str:
    names = sorted(os.listdir(root))
    shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return f"found {shown}" if names else "it is empty"


def is_run(directory: Path) -> bool:
    """Whether a folder holds a run."""
    return (directory / "config.json").is_file() and (directory / "status.json").is_file()


def write_status(folder: RunFolder, status: dict[str, Any]) -> None:
    """Replace status.json. On a full disk it is written over in place, which needs no new block. Raises OSError."""
    data = json.dumps(status, allow_nan=False).encode()
    padded = data.ljust(_STATUS_BYTES) if len(data) < _STATUS_BYTES else data
    try:
        write_atomic(folder.status, padded)
    except OSError:
        fd = os.open(folder.status, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, padded, 0)
            os.ftruncate(fd, len(padded))
        finally:
            os.close(fd)


def read_status(folder: RunFolder) -> dict[str, Any]:
    """status.json as the driver last wrote it. Raises RunError when it stays unreadable."""
    for _ in range(5):
        if status := read_json(folder.status):
            return status
        time.sleep(0.02)
    raise RunError(f"{folder.status} cannot be read as a status. The folder was damaged or removed.")


class DriverLock:
    """The right to drive a run: an exclusive flock on driver.lock, given up when the process ends in any way."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._stream: IO[bytes] | None = None

    def acquire(self, timeout_s: float = 0.0) -> None:
        """Raises RunError when another process (or another trainer of this one) drives the run."""
        stream = open(self._folder.lock, "ab")  # noqa: SIM115 - held until release
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    stream.close()
                    raise RunError(
                        f"{self._folder.root} is already driven by another trainer"
                        f"{_holder(self._folder)}. Two trainers cannot share a run folder: start in another one, "
                        f"or use rlkit.attach({str(self._folder.root)!r}) to steer the run that is there."
                    ) from None
                time.sleep(0.02)
        self._stream = stream

    def release(self) -> None:
        """Let others drive; does nothing when it is not held."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> DriverLock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def _holder(folder: RunFolder) -> str:
    status = read_json(folder.status)
    pid = status.get("pid")
    return f" (process {pid} on {status.get('host', socket.gethostname())})" if pid else ""


def lock_is_held(folder: RunFolder) -> bool:
    """Whether some process drives the run. Looks for an instant with a shared lock, so a driver waits it out."""
    try:
        stream = open(folder.lock, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return False
    with stream:
        try:
            fcntl.flock(stream.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
