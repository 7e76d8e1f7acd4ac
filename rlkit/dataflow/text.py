"""A dataflow in words: the stages for a terminal, the labels and tooltips of a drawing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["LABEL_CHARS", "edge_tooltip", "field_lines", "render_text", "returning_label", "shorten"]

LABEL_CHARS = 20
"""Characters of a field that a label shows at most."""


def render_text(graph: Mapping[str, Any]) -> str:
    """The graph in words: one line a stage, then one a feedback edge."""
    nodes: Sequence[Mapping[str, Any]] = graph["nodes"]
    stages = 1 + max((node["stage"] for node in nodes), default=-1)
    lines = [f"Dataflow: {_count(len(nodes), 'controller')} in {_count(stages, 'stage')}"]
    for stage in range(stages):
        names = ", ".join(_describe(node) for node in nodes if node["stage"] == stage)
        lines.append(f"  {stage + 1}. {names}")
    lines += [f"  {line}" for line in _feedback(graph["edges"])]
    return "\n".join(lines)


def _describe(node: Mapping[str, Any]) -> str:
    role = f" ({node['role']})" if node["role"] != node["name"] else ""
    writes = ", ".join(node["writes"])
    return f"{node['name']}{role}" + (f": {writes}" if writes else "")


def _feedback(edges: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for edge in edges:
        if edge["kind"] == "feedback":
            fields = f": {', '.join(edge['fields'])}" if edge["fields"] else ""
            weight = "" if edge["weight"] is None else f" (weight {edge['weight']:g})"
            yield f"feedback {edge['from']} -> {edge['to']}{weight}{fields}"


def _count(amount: int, noun: str) -> str:
    return f"{amount} {noun}{'' if amount == 1 else 's'}"


def shorten(text: str, limit: int = LABEL_CHARS) -> str:
    """The text, cut with an ellipsis where it is longer than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def field_lines(edge: Mapping[str, Any]) -> list[str]:
    """At most two lines of fields: both, or the first and how many more there are."""
    fields: Sequence[str] = edge["fields"]
    lines = [shorten(name) for name in fields[:2]]
    return lines if len(fields) <= 2 else [lines[0], f"+ {len(fields) - 1} more"]


def edge_tooltip(edge: Mapping[str, Any]) -> str:
    """The ports an edge connects, its weight, and every field it carries."""
    weight = "" if edge["weight"] is None else f", weight {edge['weight']:g}"
    return f"{edge['from']}.output -> {edge['to']}.{edge['kind']}{weight}\n{', '.join(edge['fields'])}".strip()


def returning_label(edge: Mapping[str, Any]) -> str:
    """One line for a feedback edge: at most two fields, and the weight."""
    fields: Sequence[str] = edge["fields"]
    words = [", ".join(shorten(name) for name in fields[:2])] if fields else [edge["kind"]]
    if len(fields) > 2:
        words[0] += f" + {len(fields) - 2} more"
    if edge["weight"] is not None:
        words.append(f"weight {edge['weight']:g}")
    return " · ".join(words)
