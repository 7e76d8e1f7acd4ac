"""Checkpoints: complete or invisible, newest by the order of saving, written in the background when asked.

    checkpoints/step_000100/
        manifest.json          written last: step, sequence number, time, size of every other file
        state.json             the tree of the state (see `state_files`)
        <part>.safetensors     tensors of each top-level part

A checkpoint is written into a hidden folder, synced, and renamed. Sequence numbers tell which one is newest, so a
leftover with a bigger step number misleads nobody.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.errors import CheckpointError, ConfigError
from rlkit.runs.layout import read_json
from rlkit.runs.state_files import PackedState, fsync_directory, pack, read_tensors, unpack, write_tensors

_NAME = re.compile(r"^(?:\.old-)?step_(\d+)$")


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When to save and what to keep; `checkpoint_config` of a trainer's configuration."""

    save_interval: int = 0
    """Steps between checkpoints; 0 saves at the start, at the end and when asked only."""
    keep_last_k: int = 3
    """Complete checkpoints to keep."""
    async_save: bool = False
    """Write in the background from a private copy of the state."""

    def __post_init__(self) -> None:
        for name, least in (("save_interval", 0), ("keep_last_k", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"checkpoint_config[{name!r}] must be a whole number from {least} up, got {value!r}")
        if not isinstance(self.async_save, bool):
            raise ConfigError(f"checkpoint_config['async_save'] must be True or False, got {self.async_save!r}")

    @classmethod
    def of(cls, config: CheckpointPolicy | Mapping[str, Any] | None) -> CheckpointPolicy:
        """From a mapping with these names. Raises ConfigError for an unknown one."""
        if isinstance(config, CheckpointPolicy):
            return config
        known = tuple(cls.__dataclass_fields__)
        unknown = set(config or {}) - set(known)
        if unknown:
            raise ConfigError(f"checkpoint_config has no {sorted(unknown)[0]!r}; known: {', '.join(known)}")
        return cls(**dict(config or {}))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    sequence: int


class CheckpointStore:
    """The checkpoints of one run. Only the process that drives the run saves; anyone may read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.skipped: list[str] = []
        """Why folders that looked like checkpoints were passed over by the last `complete`."""

    def complete(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first. What is damaged or unfinished is named in `skipped`."""
        self.skipped = []
        found: dict[int, Checkpoint] = {}
        folders = sorted(self.root.iterdir()) if self.root.is_dir() else []
        for folder in folders:
            if folder.is_dir() and _NAME.match(folder.name):
                try:
                    checkpoint = inspect(folder)
                except CheckpointError as error:
                    self.skipped.append(str(error))
                    continue
                known = found.get(checkpoint.step)
                if known is None or known.sequence < checkpoint.sequence:
                    found[checkpoint.step] = checkpoint
        return sorted(found.values(), key=lambda item: (item.sequence, item.step))

    def newest(self) -> Checkpoint:
        """The complete checkpoint that was saved last. Raises CheckpointError, saying what was skipped, if none is."""
        checkpoints = self.complete()
        if not checkpoints:
            seen = "; ".join(self.skipped) or "the folder holds none"
            raise CheckpointError(f"no complete checkpoint in {self.root}: {seen}.")
        return checkpoints[-1]

    def load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The state as it was saved, tensors on the CPU. Raises CheckpointError when files are damaged."""
        inspect(checkpoint.path)
        files: dict[str, dict[str, Any]] = {}

        def tensor(file: str, name: str) -> Any:
            if file not in files:
                files[file] = read_tensors(checkpoint.path / file)[0]
            if name not in files[file]:
                raise CheckpointError(f"{checkpoint.path / file} lacks the tensor {name!r}; the checkpoint is damaged.")
            return files[file][name]

        try:
            tree = json.loads((checkpoint.path / "state.json").read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{checkpoint.path}/state.json is damaged: {error}") from error
        state = unpack(tree, tensor)
        if not isinstance(state, dict):
            raise CheckpointError(f"{checkpoint.path}/state.json does not hold a state.")
        return state

    def save(self, state: Mapping[str, Any], step: int, keep_last_k: int | None = None) -> Checkpoint:
        """Save and wait for the disk; then remove the oldest complete ones beyond `keep_last_k`.

        Raises CheckpointError for a state that cannot be saved, OSError for a disk that is full. The older
        checkpoints are untouched then.
        """
        return self.write(pack(state, private=False), step, keep_last_k)

    def write(self, packed: PackedState, step: int, keep_last_k: int | None = None) -> Checkpoint:
        """Write what `pack` took apart; see `save`."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.clean()
        sequence = max((item.sequence for item in self.complete()), default=0) + 1
        final = self.root / f"step_{step:06d}"
        temporary = self.root / f".writing-{final.name}-{os.getpid()}"
        temporary.mkdir()
        try:
            sizes = {name: write_tensors(temporary / name, tensors) for name, tensors in packed.files.items()}
            sizes["state.json"] = _write_json(temporary / "state.json", packed.tree)
            manifest = {"step": step, "sequence": sequence, "time": time.time(), "files": sizes}
            _write_json(temporary / "manifest.json", manifest)
            fsync_directory(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._install(temporary, final)
        if keep_last_k is not None:
            self.rotate(keep_last_k)
        return Checkpoint(final, step, sequence)

    def _install(self, temporary: Path, final: Path) -> None:
        old = self.root / f".old-{final.name}"
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(temporary, final)
        fsync_directory(self.root)
        shutil.rmtree(old, ignore_errors=True)

    def rotate(self, keep_last_k: int) -> None:
        """Remove all complete checkpoints but the `keep_last_k` saved last (at least one stays)."""
        for checkpoint in self.complete()[: -max(1, keep_last_k)]:
            # The manifest goes first: a checkpoint whose removal is cut short is incomplete, not damaged.
            (checkpoint.path / "manifest.json").unlink(missing_ok=True)
            shutil.rmtree(checkpoint.path, ignore_errors=True)

    def clean(self) -> None:
        """Remove what an interrupted save has left: unfinished folders, and replaced ones whose successor is there."""
        for folder in list(self.root.glob(".writing-step_*")):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in list(self.root.glob(".old-step_*")):
            successor = self.root / folder.name.removeprefix(".old-")
            if successor.exists():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                os.rename(folder, successor)


def inspect(folder: Path) -> Checkpoint:
    """Check that a checkpoint is complete: manifest present, every file of the size it had. Raises CheckpointError."""
    manifest = read_json(folder / "manifest.json")
    step, sequence, files = manifest.get("step"), manifest.get("sequence"), manifest.get("files")
    if not isinstance(step, int) or not isinstance(sequence, int) or not isinstance(files, dict):
        raise CheckpointError(f"{folder.name} has no readable manifest.json, so it was never finished")
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise CheckpointError(f"{folder.name} lacks {name}") from None
        if found != size:
            raise CheckpointError(f"{folder.name}/{name} has {found} bytes instead of {size}")
    return Checkpoint(folder, step, sequence)


def _write_json(path: Path, value: Any) -> int:
    data = json.dumps(value, allow_nan=False).encode()
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return len(data)


class BackgroundSaver:
    """Writes checkpoints on a thread, one after the other. What it saves was copied before `save` returned."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._done: list[tuple[Checkpoint | BaseException, Any]] = []

    def save(self, state: Mapping[str, Any], step: int, keep_last_k: int | None = None, tag: Any = None) -> None:
        """Copy the state and begin to write it; waits for a save that is still going on.

        `tag` comes back with the outcome.
        """
        packed = pack(state, private=True)
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(packed, step, keep_last_k, tag), name="rlkit-checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, packed: PackedState, step: int, keep_last_k: int | None, tag: Any) -> None:
        outcome: Checkpoint | BaseException
        try:
            outcome = self._store.write(packed, step, keep_last_k)
        except BaseException as error:  # handed to `finished`, which the driver asks at each boundary
            outcome = error
        with self._lock:
            self._done.append((outcome, tag))

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the save that is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finished(self) -> list[tuple[Checkpoint | BaseException, Any]]:
        """What was completed, or why not, since the last call, in order, each with its tag."""
        with self._lock:
            done, self._done = self._done, []
        return done
