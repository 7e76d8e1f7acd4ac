"""What a lint found, as text, as a table, and as a cell's output."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Finding", "LintReport", "Severity"]

Severity = Literal["error", "warning", "info"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "info")
_SIGNS = {"error": "✖", "warning": "▲", "info": "·"}
_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One thing that a check has to say."""

    check: str
    """"values", "constant", "scale", "latency", "length", "terms", "groups", "abstention", "determinism", "samples"."""
    term: str
    """Name of the reward term; two joined by " / " where it is about a pair; "reward" for their sum."""
    severity: Severity
    """"error": training on it is wrong. "warning": it likely does other than is meant. "info": good to know."""
    value: float
    """The number that was judged; its meaning stands in the message."""
    message: str
    """What it means and what to do."""


@dataclass(frozen=True)
class LintReport:
    """The findings of a lint, the gravest first."""

    findings: tuple[Finding, ...]
    terms: tuple[str, ...]
    """Names of the reward terms that were looked at."""
    rollouts: int
    """Rollouts that were looked at."""

    @staticmethod
    def of(findings: Sequence[Finding], terms: Sequence[str], rollouts: int) -> LintReport:
        """A report with the findings in order."""
        ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.severity))
        return LintReport(tuple(ordered), tuple(terms), rollouts)

    @property
    def ok(self) -> bool:
        """True when there is no error and no warning."""
        return all(finding.severity == "info" for finding in self.findings)

    def table(self) -> pd.DataFrame:
        """One row a finding: check, term, severity, value, message."""
        import pandas as pd

        names = ["check", "term", "severity", "value", "message"]
        return pd.DataFrame([[getattr(f, name) for name in names] for f in self.findings], columns=names)

    @property
    def headline(self) -> str:
        """Such as "2 terms, 64 rollouts: 1 error, no warnings"."""
        counts = {kind: sum(f.severity == kind for f in self.findings) for kind in ("error", "warning")}
        said = ", ".join(f"{count or 'no'} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items())
        terms = f"{len(self.terms)} term{'' if len(self.terms) == 1 else 's'}"
        return f"{terms}, {self.rollouts} rollout{'' if self.rollouts == 1 else 's'}: {said}"

    def __repr__(self) -> str:
        lines = [f"reward lint of {self.headline}"]
        heads = [f"{_SIGNS[f.severity]} {f.severity}" for f in self.findings]
        columns = [heads, [f.check for f in self.findings], [f.term for f in self.findings]]
        widths = [max(map(len, column), default=0) for column in columns]
        for row, finding in enumerate(self.findings):
            start = "  ".join(column[row].ljust(width) for column, width in zip(columns, widths, strict=True))
            blank = " " * (len(start) + 2)
            room = max(_WIDTH - len(blank), 40)
            lines.append(start + "  " + f"\n{blank}".join(textwrap.wrap(finding.message, room)))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """A table that takes its colours from the page, so that it reads in light and dark themes."""
        rows = "".join(
            "<tr>"
            f'<th scope="row" style="{_CELL}white-space:nowrap">{_SIGNS[f.severity]} {f.severity}</th>'
            f'<td style="{_CELL}">{html.escape(f.check)}</td>'
            f'<td style="{_CELL}overflow-wrap:anywhere">{html.escape(f.term)}</td>'
            f'<td style="{_CELL}max-width:60em">{html.escape(f.message)}</td>'
            "</tr>"
            for f in self.findings
        )
        names = "".join(
            f'<th scope="col" style="{_CELL}">{name}</th>' for name in ("severity", "check", "term", "what to do")
        )
        return (
            '<table style="border-collapse:collapse;color:inherit;background:transparent">'
            f'<caption style="caption-side:top;text-align:left;color:inherit">Reward lint of '
            f"{html.escape(self.headline)}</caption><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>"
        )


_CELL = "text-align:left;vertical-align:top;padding:0.3em 0.8em 0.3em 0;border-top:1px solid currentColor;"
