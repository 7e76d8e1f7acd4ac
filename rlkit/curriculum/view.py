"""A curriculum as a table, for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from rlkit.curriculum.stages import Stage, Until


def stage_table(stages: Sequence[Stage], rules: Sequence[Until | None], current: int | None = None) -> str:
    """The stages as an HTML table: name, mixture, what ends them; the one in force is marked."""
    rows = []
    for index, (stage, rule) in enumerate(zip(stages, rules, strict=True)):
        name = escape(stage.name)
        if index == current:
            name = f"<b>▶ {name}</b>"
        cells = (name, escape(stage.mixture_text()), escape("goes on" if rule is None else str(rule)))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return _table(("stage", "mixture", "ends"), rows)


def pool_table(weights: Mapping[str, float], rates: Mapping[str, float | None]) -> str:
    """The pools as an HTML table: share of the next prompts and pass rate."""
    total = sum(weights.values())
    rows = []
    for pool, weight in weights.items():
        rate = rates[pool]
        known = "–" if rate is None else f"{rate:.0%}"
        rows.append(f"<tr><td>{escape(pool)}</td><td>{weight / total:.0%}</td><td>{known}</td></tr>")
    return _table(("pool", "share", "pass rate"), rows)


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
