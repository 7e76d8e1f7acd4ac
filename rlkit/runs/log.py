"""Append-only files of JSON lines that survive crashes, full disks and several readers.

A line counts once its newline is on disk. A process that dies in the middle of a line leaves a torn tail; the
next writer repairs it, and readers never see it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlkit.errors import RunError

_TAIL_BLOCK = 1 << 16
_CHUNK = 1 << 24


def dump_line(record: dict[str, Any]) -> bytes:
    """One JSON object as a line of UTF-8 with its newline. Non-finite numbers are not JSON: encode them before."""
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def write_all(fd: int, data: bytes) -> None:
    """Append `data` to a file as a whole or not at all: a failed write is cut off again. Raises OSError."""
    before = os.fstat(fd).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, before)
        raise


def repair_tail(fd: int) -> int:
    """Cut a torn last line off (or end it, when only the newline is missing). Returns the bytes removed."""
    info = os.fstat(fd)
    size = info.st_size
    if not stat.S_ISREG(info.st_mode) or size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return 0
    end, tail = size, b""
    while end > 0 and b"\n" not in tail:
        start = max(0, end - _TAIL_BLOCK)
        tail = os.pread(fd, end - start, start) + tail
        end = start
    torn = tail.rsplit(b"\n", 1)[-1]
    try:
        whole = isinstance(json.loads(torn), dict)
    except ValueError:
        whole = False
    if whole:
        write_all(fd, b"\n")
        return 0
    os.ftruncate(fd, size - len(torn))
    return len(torn)


class LineWriter:
    """The only writer of a JSON-lines file. Each line reaches the kernel before `write` returns.

    After a failed write the file is as before, and the next write opens it afresh (a disk that was full or
    unmounted may be back).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def _open(self) -> int:
        if self._fd is None:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                repair_tail(fd)
            except OSError:
                os.close(fd)
                raise
            self._fd = fd
        return self._fd

    def write(self, *records: dict[str, Any]) -> None:
        """Append records, all or none. Raises OSError (e.g. ENOSPC)."""
        data = b"".join(map(dump_line, records))
        try:
            write_all(self._open(), data)
        except OSError:
            self.close()
            raise

    def sync(self) -> None:
        """Wait until the disk holds what was written."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; writing opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def append_shared(path: Path, record: dict[str, Any]) -> None:
    """Append one line to a file that several processes write. A torn tail of another writer is closed off first.

    Raises RunError when the folder is gone or the disk is full; nothing is left behind then.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunError(f"cannot write to {path}: {error.strerror}. Is this still a run folder?") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        write_all(fd, (b"\n" if torn else b"") + json.dumps(record, separators=(",", ":")).encode() + b"\n")
    except OSError as error:
        raise RunError(f"cannot write to {path}: {error.strerror}; nothing was sent.") from error
    finally:
        os.close(fd)


class LineCursor:
    """Reads the complete lines that were added since the last call. Remembers its byte offset.

    A file that became shorter than what was read (replaced by another) is read again from its start; `restarts`
    counts that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.restarts = 0

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(byte offset of the line, line without its newline) of each complete line that is new."""
        while data := self._read():
            if b"\n" not in data:
                return
            start = 0
            while (end := data.find(b"\n", start)) >= 0:
                line, at = data[start:end], self.offset
                start = end + 1
                self.offset = at + len(line) + 1
                if line.strip():
                    yield at, line

    def _read(self) -> bytes:
        """The next bytes after the offset: at least one whole line where there is one."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            size = os.fstat(fd).st_size
            if size < self.offset:
                self.offset = 0
                self.restarts += 1
            length = _CHUNK
            while True:
                data = os.pread(fd, min(length, size - self.offset), self.offset)
                if b"\n" in data or len(data) >= size - self.offset:
                    return data
                length *= 2
        finally:
            os.close(fd)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object on a line, or None when it is not one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
