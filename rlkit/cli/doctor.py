"""`rlkit doctor`: what is installed, what is missing and what to do about it."""

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlkit.cli import machine, packages
from rlkit.cli.finding import Finding

_MARKS = {"ok": ("✓", "green"), "note": ("·", "dim"), "warning": ("!", "bold yellow"), "broken": ("✗", "bold red")}


def examine() -> Iterator[tuple[str, list[Finding]]]:
    """Sections of findings, in the order they are shown."""
    sections: dict[str, Callable[[], list[Finding]]] = {
        "Python packages": packages.findings,
        "GPU": machine.gpu,
        "Machine": machine.resources,
        "Notebooks": machine.notebooks,
        "Runs": machine.drivers,
    }
    for title, look in sections.items():
        yield title, look()


def doctor() -> bool:
    """Print the report; False when something is broken."""
    console = Console(highlight=False)
    counts = {"warning": 0, "broken": 0}
    for title, findings in examine():
        console.print(Text(f"\n{title}", style="bold"))
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(no_wrap=True, min_width=16)
        table.add_column(overflow="fold")
        for finding in findings:
            mark, style = _MARKS[finding.state]
            text = Text(finding.found)
            if finding.advice:
                text.append(f"\n→ {finding.advice}", style=style if finding.state != "note" else "dim")
            table.add_row(Text(mark, style=style), finding.name, text)
            if finding.state in counts:
                counts[finding.state] += 1
        console.print(table)
    verdict = "rlkit can run here" if not counts["broken"] else "rlkit cannot run here as it is"
    console.print(Text(f"\n{verdict}: {counts['broken']} broken, {counts['warning']} to look at", style="bold"))
    return not counts["broken"]
