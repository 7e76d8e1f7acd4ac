"""What a lint says, as text and in a cell."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

from rlkit.reward_lint import LintReport
from tests.reward_lint.tables import RISING, lint


def report() -> LintReport:
    nasty = "<script>alert(1)</script>"
    return lint(**{f"reward/{nasty}": [1.0] * 16, "reward/b": [math.inf, *RISING[1:]], "reward/c": RISING})


def test_the_report_as_text_is_aligned_with_the_gravest_first() -> None:
    lines = repr(report()).splitlines()
    assert lines[0].startswith("reward lint of 3 terms, 16 rollouts: 1 error, ")
    assert lines[1].startswith("✖ error    values")
    assert [line for line in lines if len(line) > 125] == []
    starts = {line.index(f.message[:12]) for f in report().findings for line in lines if f.message[:12] in line}
    assert len(starts) == 1
    severities = [f.severity for f in report().findings]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    assert not report().ok
    assert list(report().table()["severity"]) == severities


def test_the_report_in_a_cell_is_escaped_and_takes_its_colours_from_the_page() -> None:
    page = report()._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "✖ error" in page, "severity is told in words and signs, not by colour alone"
    assert "color:inherit" in page
    assert "#" not in page.replace("&#x27;", "")
    assert page.count("<tr>") == page.count("</tr>") == len(report().findings) + 1


def test_lint_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys, rlkit; r = rlkit.lint_rewards({'prompt': ['p'], 'response': ['r']}, lambda response: 1.0); "
        "print(len(r.findings), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
