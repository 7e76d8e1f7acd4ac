"""Tables of rollouts for tests of the lint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlkit.reward_lint import Finding, LintReport, lint_rewards
from rlkit.runs.layout import RunFolder, write_status

# Sixteen lengths whose ranks have no correlation with 0..15: they rise, and then fall back the same way.
LENGTHS = [10, 11, 12, 13, 14, 15, 16, 17, 17, 16, 15, 14, 13, 12, 11, 10]
RISING = [float(i) for i in range(16)]


def table(**columns: Any) -> dict[str, list[Any]]:
    """Sixteen rollouts in four groups, with a reward that no check has anything against."""
    base: dict[str, list[Any]] = {
        "step": [1] * 16,
        "row": [i // 4 for i in range(16)],
        "group": [i // 4 for i in range(16)],
        "prompt": [f"prompt {i // 4}" for i in range(16)],
        "response": [f"{i:x}" * length for i, length in enumerate(LENGTHS)],
        "response_length": LENGTHS,
        "finish_reason": ["stop"] * 16,
    }
    return base | columns


def make_run(root: Path) -> RunFolder:
    root.mkdir()
    folder = RunFolder(root)
    folder.config.write_text("{}")
    write_status(folder, {"state": "stopped", "step": 1, "came_up": True})
    return folder


def found(report: LintReport, check: str) -> Finding:
    """The one finding of a check."""
    (finding,) = [f for f in report.findings if f.check == check]
    return finding


def lint(fn: Any = None, **columns: Any) -> LintReport:
    return lint_rewards(table(**columns), fn)
