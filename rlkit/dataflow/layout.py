"""Where the boxes and lines of a drawn dataflow go: columns by stage, rows chosen so that few lines cross.

All lengths are SVG user units (pixels at scale 1). Text is measured by an average width per character.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from rlkit.dataflow.svg_paths import Point, around, number, through
from rlkit.dataflow.text import edge_tooltip, field_lines, returning_label, shorten

__all__ = ["Box", "Drawing", "Route", "lay_out"]

_PAD = 18.0
_ROW_GAP = 24.0
_CURVE = 40.0
_BEND_HEIGHT = 16.0
_BOX_HEIGHT = 44.0
_ABOVE_PORT, _BELOW_PORT, _BELOW_PORT_2 = 16.0, 6.0, 20.0
_NAME_CHAR, _TEXT_CHAR = 8.3, 6.7
_CORNER = 12.0
_LANE = 26.0
_SPREAD = 14.0

Label: TypeAlias = tuple[str, Point, Literal["middle", "end"]]


@dataclass(frozen=True)
class Bend:
    """Where a long edge passes a column without entering a box there."""

    edge: int
    column: int


Item: TypeAlias = str | Bend
"""What stands in a column: a controller, by name, or a passing edge."""


@dataclass
class Box:
    """One controller."""

    title: str
    note: str
    role: str
    tooltip: str
    column: int
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    lowest: bool = True
    """Whether no other box stands below it in its column."""

    @property
    def middle(self) -> float:
        """Height of its centre."""
        return self.y + self.height / 2

    @property
    def right(self) -> float:
        """Its right border."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Its lower border."""
        return self.y + self.height


@dataclass
class Route:
    """One edge as it is drawn."""

    path: str
    tip: Point
    enters: Literal["left", "bottom"]
    dashed: bool
    tooltip: str
    labels: list[Label] = field(default_factory=list)


@dataclass
class Drawing:
    """Everything with its place."""

    boxes: list[Box]
    routes: list[Route]
    width: float
    height: float


def lay_out(graph: Mapping[str, Any]) -> Drawing:
    """Place the nodes and edges of a graph, as `Dataflow.to_json` gives it."""
    plan = _Plan(graph)
    plan.place()
    routes = [plan.forward_route(index) for index in plan.forward] + plan.returning_routes()
    return Drawing(list(plan.boxes.values()), routes, plan.width, plan.height)


class _Plan:
    def __init__(self, graph: Mapping[str, Any]) -> None:
        self.boxes: dict[str, Box] = {node["name"]: _box(node) for node in graph["nodes"]}
        self.edges: list[Mapping[str, Any]] = list(graph["edges"])
        self.forward = [i for i, edge in enumerate(self.edges) if self._is_forward(edge)]
        self.returning = [i for i in range(len(self.edges)) if i not in self.forward]
        self.taken: dict[tuple[str | int, str], int] = {}
        self.columns = self._order_columns()
        self.entries: dict[str, list[int]] = {name: [] for name in self.boxes}
        for index in self.forward:
            self.entries[self.edges[index]["to"]].append(index)
        self.bend_y: dict[Bend, float] = {}
        self.zone: list[float] = []
        self.width = self.height = 0.0

    def _is_forward(self, edge: Mapping[str, Any]) -> bool:
        return edge["kind"] == "input" and self.boxes[edge["from"]].column < self.boxes[edge["to"]].column

    def _chain(self, index: int) -> list[Item]:
        """What edge `index` touches, column by column."""
        source, target = self.edges[index]["from"], self.edges[index]["to"]
        between = range(self.boxes[source].column + 1, self.boxes[target].column)
        return [source, *(Bend(index, column) for column in between), target]

    def _order_columns(self) -> list[list[Item]]:
        """Items of each column from top to bottom, sorted a few times by the mean place of their neighbours."""
        columns: list[list[Item]] = [[] for _ in range(1 + max((b.column for b in self.boxes.values()), default=-1))]
        for name, box in self.boxes.items():
            columns[box.column].append(name)
        left: dict[Item, list[Item]] = {}
        right: dict[Item, list[Item]] = {}
        for index in self.forward:
            chain = self._chain(index)
            for bend in _bends(chain):
                columns[bend.column].append(bend)
            for one, other in pairwise(chain):
                right.setdefault(one, []).append(other)
                left.setdefault(other, []).append(one)
        for _ in range(3):
            for neighbours, order in ((left, columns), (right, columns[::-1])):
                for before, column in pairwise(order):
                    _sort_by_neighbours(column, before, neighbours)
        return columns

    def place(self) -> None:
        """Give every box and bend its place: columns from left to right, each centred in height."""
        x = _PAD
        for number_, column in enumerate(self.columns):
            names = [item for item in column if isinstance(item, str)]
            boxes = [self.boxes[name] for name in names]
            entering = [index for name in names for index in self.entries[name]]
            widths = [len(line) * _TEXT_CHAR for index in entering for line in field_lines(self.edges[index])]
            self.zone.append(max(widths, default=0.0) + 22)
            x += _CURVE + self.zone[number_] if number_ else 0.0
            for name, box in zip(names, boxes, strict=True):
                box.lowest = name == names[-1]
                box.height = max(box.height, self._ports_height(name) + self._returns_height(name) + 6)
                box.width, box.x = max(b.width for b in boxes), x
            x += max(b.width for b in boxes)
        self.width = x + _PAD + _SPREAD
        heights = [sum(self._item_height(item) for item in c) + _ROW_GAP * (len(c) - 1) for c in self.columns]
        tallest = max(heights, default=0.0)
        for column, height in zip(self.columns, heights, strict=True):
            self._place_rows(column, _PAD + (tallest - height) / 2)
        self.height = tallest + 2 * _PAD

    def _place_rows(self, column: Sequence[Item], y: float) -> None:
        for item in column:
            if isinstance(item, str):
                self.boxes[item].y = y
                self.entries[item].sort(key=self._last_height)
            else:
                self.bend_y[item] = y + _BEND_HEIGHT / 2
            y += self._item_height(item) + _ROW_GAP

    def _item_height(self, item: Item) -> float:
        return self.boxes[item].height if isinstance(item, str) else _BEND_HEIGHT

    def _port_height(self, index: int) -> float:
        return _ABOVE_PORT + (_BELOW_PORT_2 if len(field_lines(self.edges[index])) > 1 else _BELOW_PORT)

    def _ports_height(self, name: str) -> float:
        return sum(self._port_height(index) for index in self.entries[name])

    def _returns_height(self, name: str) -> float:
        """Room for the returning edges that enter a box at its left, which those at the foot of a column do not."""
        entering = sum(self.edges[index]["to"] == name for index in self.returning)
        return 0.0 if self.boxes[name].lowest else _SPREAD * entering

    def _last_height(self, index: int) -> float:
        """Height from which edge `index` comes before it enters its target."""
        item = self._chain(index)[-2]
        return self.boxes[item].middle if isinstance(item, str) else self.bend_y[item]

    def forward_route(self, index: int) -> Route:
        """An input edge: curves between columns, then straight along its label into the box."""
        edge = self.edges[index]
        source, target, name = self.boxes[edge["from"]], self.boxes[edge["to"]], edge["to"]
        above = self.entries[name][: self.entries[name].index(index)]
        y = target.middle
        if len(self.entries[name]) > 1 or self._returns_height(name):
            y += _ABOVE_PORT - (self._ports_height(name) + self._returns_height(name)) / 2
            y += sum(self._port_height(other) for other in above)
        points: list[Point] = [(source.right, source.middle)]
        for bend in _bends(self._chain(index)):
            column = [self.boxes[item] for item in self.columns[bend.column] if isinstance(item, str)]
            height = self.bend_y[bend]
            points += [(column[0].x - self.zone[bend.column], height), (column[0].right, height)]
        points.append((target.x - self.zone[target.column], y))
        path = through(points) + f"H{number(target.x - 7)}"
        labels: list[Label] = [
            (line, (target.x - 12, y + 14 if below else y - 5), "end") for below, line in enumerate(field_lines(edge))
        ]
        return Route(path, (target.x, y), "left", False, edge_tooltip(edge), labels)

    def returning_routes(self) -> list[Route]:
        """Feedback edges (and inputs that run backwards), each in a lane of its own under the boxes."""
        order = sorted(self.returning, key=lambda i: abs(self._column_of(i, "from") - self._column_of(i, "to")))
        bottom = max((box.bottom for box in self.boxes.values()), default=0.0)
        routes = []
        for place, index in enumerate(order):
            edge = self.edges[index]
            lane = bottom + _LANE * (place + 1)
            start, down_x = self._leave(edge["from"])
            end, up_x = self._enter(edge["to"])
            path = around(start, down_x, lane, up_x, end, _CORNER)
            label: Label = (returning_label(edge), ((down_x + up_x) / 2, lane - 5), "middle")
            enters: Literal["left", "bottom"] = "bottom" if end[0] == up_x else "left"
            routes.append(Route(path, end, enters, edge["kind"] == "feedback", edge_tooltip(edge), [label]))
            self.height = max(self.height, lane + _PAD)
        return routes

    def _column_of(self, index: int, end: str) -> int:
        return self.boxes[self.edges[index][end]].column

    def _leave(self, name: str) -> tuple[Point, float]:
        """Where a returning edge leaves a box, and the x at which it goes down."""
        box = self.boxes[name]
        if box.lowest:
            x = box.x + box.width / 2 + _SPREAD * (self._next(name, "out") + 0.5)
            return (x, box.bottom), x
        return (box.right, box.bottom - 8), box.right + _CORNER + 6 * self._next(box.column, "out")

    def _enter(self, name: str) -> tuple[Point, float]:
        """Where a returning edge enters a box, and the x at which it comes up."""
        box = self.boxes[name]
        if box.lowest:
            x = box.x + box.width / 2 - _SPREAD * (self._next(name, "in") + 0.5)
            return (x, box.bottom), x
        away = self.zone[box.column] if any(self.entries.values()) else 0.0
        y = box.bottom - 9 - _SPREAD * self._next(name, "in")
        return (box.x, y), box.x - away + 2 - 6 * self._next(box.column, "in")

    def _next(self, place: str | int, way: str) -> int:
        """How many returning edges took this place before, so that no two lie on each other."""
        count = self.taken[place, way] = self.taken.get((place, way), -1) + 1
        return count


def _bends(chain: Sequence[Item]) -> list[Bend]:
    return [item for item in chain if isinstance(item, Bend)]


def _box(node: Mapping[str, Any]) -> Box:
    role = [node["role"]] if node["role"] != node["name"] else []
    notes = [*role, *([node["device"]] if node["device"] else []), *(["streams"] if node["streams"] else [])]
    note = " · ".join(notes)
    title = shorten(node["name"], 22)
    width = max(len(title) * _NAME_CHAR, len(note) * _TEXT_CHAR, 56.0) + 24
    facts = [("reads", node["reads"]), ("writes", node["writes"]), ("learns from", node["learns_from"])]
    tooltip = "\n".join([f"{node['name']} ({node['type']})", *(f"{k}: {', '.join(v)}" for k, v in facts if v)])
    return Box(title, note, node["role"], tooltip, node["stage"], width, _BOX_HEIGHT)


def _sort_by_neighbours(column: list[Item], before: Sequence[Item], neighbours: Mapping[Item, list[Item]]) -> None:
    rank = {item: number for number, item in enumerate(before)}
    place = {item: number for number, item in enumerate(column)}

    def mean(item: Item) -> float:
        ranks = [rank[other] for other in neighbours.get(item, ()) if other in rank]
        return sum(ranks) / len(ranks) if ranks else float(place[item])

    column.sort(key=mean)
