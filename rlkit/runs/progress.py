"""One line of progress for training in a cell or a terminal. Kept apart from results; off by one switch."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rlkit.runs.protocol import StepResult

_WIDTH = 24
_SHOWN = (("reward/mean", "reward"), ("kl/per_token", "kl"), ("preferences/accuracy", "accuracy"))


class ProgressLine:
    """Redraws a line on stderr after each step."""

    def __init__(self, first_step: int, total_steps: int | None, stream: TextIO | None = None) -> None:
        self._first, self._total = first_step, total_steps
        self._stream = stream or sys.stderr
        self._started = time.monotonic()
        self._drawn = 0

    def __call__(self, result: StepResult) -> None:
        """Draw the state after a step."""
        done = result.step - self._first
        seconds = (time.monotonic() - self._started) / max(1, done)
        parts = [f"step {result.step}"]
        if self._total is not None:
            filled = round(_WIDTH * done / max(1, self._total - self._first))
            parts = ["█" * filled + "░" * (_WIDTH - filled), f"step {result.step}/{self._total}"]
        parts.append(f"{seconds:.2f} s/step")
        parts += [f"{label} {result.metrics[name]:.3f}" for name, label in _SHOWN if name in result.metrics]
        self._draw("  ".join(parts))

    def _draw(self, text: str) -> None:
        self._stream.write("\r" + text.ljust(self._drawn))
        self._stream.flush()
        self._drawn = len(text)

    def close(self) -> None:
        """End the line."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
