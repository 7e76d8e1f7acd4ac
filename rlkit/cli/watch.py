"""`rlkit watch`: a live dashboard in the terminal. It only reads; leaving it never touches the run."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from rlkit.cli.frame import frame
from rlkit.cli.view import RunView

_ONCE_HEIGHT = 40


def watch(directory: Path, *, once: bool = False, metrics: Sequence[str] = (), interval_s: float = 0.5) -> None:
    """Draw the run until q or Ctrl-C. With `once`, or when the output is no terminal, print one frame.

    Raises RunError when the folder is not a run.
    """
    console = Console()
    view = RunView(directory)
    if once or not console.is_terminal:
        height = max(_ONCE_HEIGHT, console.height - 1) if console.is_terminal else _ONCE_HEIGHT
        console.print(frame(view, console.width, height, metrics), height=height)
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            view.update()
            live.update(frame(view, console.width, console.height, metrics), refresh=True)
            if _wait(keys, interval_s) in ("q", "Q"):
                return


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """The terminal's file descriptor with single key presses readable, or None when there is no keyboard."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):
        yield None
        return
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _wait(fd: int | None, seconds: float) -> str:
    """Wait for a key for at most `seconds`; "" when none was pressed."""
    if fd is None:
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([fd], [], [], seconds)
    return os.read(fd, 1).decode(errors="replace") if ready else ""
