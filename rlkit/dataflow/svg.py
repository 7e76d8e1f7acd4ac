"""Draws a dataflow as a self-contained SVG, from the plain values of `Dataflow.to_json`.

Columns are stages, left to right. Input edges are solid and carry their fields next to the controller they enter;
feedback edges are dashed and run back underneath. The picture brings its own background, so that it is legible on a
light and on a dark page, and names every role in words besides colouring it.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

from rlkit.dataflow.layout import Box, Route, lay_out
from rlkit.dataflow.svg_paths import number
from rlkit.dataflow.text import render_text

__all__ = ["render_svg"]

_ROLE_COLOURS = {
    "actor": ("#b4dcf5", "#2b6f9e"),
    "reward": ("#a9dfc9", "#1f7a5a"),
    "critic": ("#f9d3a0", "#a5660f"),
    "reference": ("#d9dbdf", "#5f6670"),
    "scorer": ("#c3ccf4", "#4a57a8"),
    "mixer": ("#f2e79b", "#857400"),
    "advantage": ("#ecc4dc", "#9c4a7c"),
}
"""Fill and border per role: light tints of hues that stay apart with colour-blindness, under dark text."""

_OTHER_ROLE = ("#ebe5da", "#766a55")

_STYLE = """
.rlkit-flow{--paper:#fff;--ink:#24292f;--line:#57606a;--back:#9a3412;font:11px system-ui,sans-serif}
@media (prefers-color-scheme:dark){.rlkit-flow{--paper:#161b22;--ink:#e6edf3;--line:#9aa4af;--back:#f0a35e}}
.rlkit-flow text{fill:var(--ink)}
.rlkit-flow .label{paint-order:stroke;stroke:var(--paper);stroke-width:4px;stroke-linejoin:round}
.rlkit-flow .name{font-size:13px;font-weight:600}
.rlkit-flow .box text{fill:#1b1f24}
.rlkit-flow path{fill:none;stroke:var(--line);stroke-width:1.5px}
.rlkit-flow .back path{stroke:var(--back);stroke-dasharray:6 4}
.rlkit-flow polygon{fill:var(--line)}
.rlkit-flow .back polygon{fill:var(--back)}
.rlkit-flow .back .label{fill:var(--back)}
""".replace("\n", "")


def render_svg(graph: Mapping[str, Any]) -> str:
    """The picture of a graph.

    Args:
        graph: what `Dataflow.to_json` returns, or `dataflow.json` of a run holds.

    Returns:
        An SVG document without scripts, external references or ids.
    """
    drawing = lay_out(graph)
    width, height = round(max(drawing.width, 140)), round(max(drawing.height, 44))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="rlkit-flow" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<title>Dataflow of {len(graph['nodes'])} controllers</title><desc>{escape(render_text(graph))}</desc>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" style="fill:var(--paper)"/>',
    ]
    if not graph["nodes"]:
        parts.append('<text x="16" y="27">empty dataflow</text>')
    parts += [_route(route) for route in drawing.routes]
    parts += [_box(box) for box in drawing.boxes]
    return "".join([*parts, "</svg>"])


def _box(box: Box) -> str:
    fill, border = _ROLE_COLOURS.get(box.role, _OTHER_ROLE)
    middle = box.x + box.width / 2
    offset = 4 if not box.note else -3
    lines = [f'<text class="name" x="{number(middle)}" y="{number(box.middle + offset)}">{escape(box.title)}</text>']
    if box.note:
        lines.append(f'<text x="{number(middle)}" y="{number(box.middle + 13)}">{escape(box.note)}</text>')
    x, y, width, height = (number(value) for value in (box.x, box.y, box.width, box.height))
    return (
        f'<g class="box" text-anchor="middle"><title>{escape(box.tooltip)}</title>'
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}" stroke="{border}" '
        f'stroke-width="1.5"/>{"".join(lines)}</g>'
    )


def _route(route: Route) -> str:
    x, y = route.tip
    if route.enters == "left":
        tip = f"{number(x)},{number(y)} {number(x - 8)},{number(y - 4)} {number(x - 8)},{number(y + 4)}"
    else:
        tip = f"{number(x)},{number(y)} {number(x - 4)},{number(y + 8)} {number(x + 4)},{number(y + 8)}"
    labels = "".join(
        f'<text class="label" text-anchor="{anchor}" x="{number(at[0])}" y="{number(at[1])}">{escape(text)}</text>'
        for text, at, anchor in route.labels
    )
    kind = ' class="back"' if route.dashed else ""
    return (
        f'<g{kind}><title>{escape(route.tooltip)}</title><path d="{route.path}"/><polygon points="{tip}"/>{labels}</g>'
    )
