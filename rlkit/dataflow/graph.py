"""The graph of controllers: who feeds whom, in which order they run, and what is wrong with it before anything runs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rlkit.controllers.base import Controller, Port, field_names
from rlkit.dataflow.checks import PROMPT_FIELDS, check_dataflow, cycle_message, find_cycle
from rlkit.dataflow.svg import render_svg
from rlkit.dataflow.text import render_text
from rlkit.errors import DataflowError

__all__ = ["Dataflow", "Edge"]


@dataclass(frozen=True)
class Edge:
    """One connection. `input` edges order the forward run, `feedback` edges say what a controller learns from."""

    source: Controller
    target: Controller
    kind: Literal["input", "feedback"]
    weight: float | None = None
    """Share of the feedback that `target` takes; None is all of it. Input edges have none."""

    def __str__(self) -> str:
        return f"{self.source.name}.output -> {self.target.name}.{self.kind}"


class Dataflow:
    """Controllers and the connections between them, written in any order.

        Dataflow().connect(actor.output, reward.input).connect(reward.output, critic.input)

    A controller sees the fields of everything upstream of it, however many controllers lie between. Evaluated last in a
    notebook cell, a dataflow draws itself.
    """

    def __init__(self) -> None:
        self._controllers: list[Controller] = []
        self._edges: dict[tuple[Port, Port], Edge] = {}

    def connect(self, source: Port, target: Port, weight: float | None = None) -> "Dataflow":
        """Lead the output of one controller into another one. Connecting the same ports again replaces the weight.

        Args:
            source: an `.output` port.
            target: an `.input` port (orders the forward run) or a `.feedback` port (closes a loop).
            weight: share of the feedback that the target learns from, finite and not negative; feedback only.

        Returns:
            This dataflow, so that calls can be chained.

        Raises:
            DataflowError: the ports are of the wrong kind, or the weight is none.
        """
        source, target = _port(source, "first"), _port(target, "second")
        if source.kind != "output":
            raise DataflowError(
                f"connect({source}, {target}): the first port must be an output, {source} is of kind {source.kind!r}; "
                f"write connect({source.controller.name}.output, ...)"
            )
        if target.kind == "output":
            raise DataflowError(
                f"connect({source}, {target}): the second port must be an input or a feedback port, {target} is an "
                f"output; write connect(..., {target.controller.name}.input)"
            )
        if weight is not None:
            _check_weight(source, target, weight)
        self.add(source.controller, target.controller)
        self._edges[source, target] = Edge(source.controller, target.controller, target.kind, weight)
        return self

    def add(self, *controllers: Controller) -> "Dataflow":
        """Add controllers that no edge names yet; those already there stay where they are."""
        for controller in controllers:
            if not isinstance(controller, Controller):
                raise DataflowError(f"add({controller!r}): expected a Controller, given {type(controller).__name__}")
            if controller not in self:
                self._controllers.append(controller)
        return self

    def copy(self) -> "Dataflow":
        """A dataflow of the same controllers that can be added to without changing this one."""
        copied = Dataflow()
        copied._controllers, copied._edges = list(self._controllers), dict(self._edges)
        return copied

    @property
    def controllers(self) -> tuple[Controller, ...]:
        """All controllers, in the order they were first named."""
        return tuple(self._controllers)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All connections, in the order they were first made."""
        return tuple(self._edges.values())

    def __contains__(self, controller: object) -> bool:
        return any(controller is known for known in self._controllers)

    def __len__(self) -> int:
        return len(self._controllers)

    def __iter__(self) -> Iterator[Controller]:
        return iter(self.controllers)

    def __getitem__(self, name: str) -> Controller:
        for controller in self._controllers:
            if controller.name == name:
                return controller
        raise DataflowError(f"no controller is named {name!r}; there are {_names(self._controllers)}")

    def by_role(self, role: str) -> tuple[Controller, ...]:
        """The controllers of one role, in the order they were first named."""
        return tuple(controller for controller in self._controllers if controller.role == role)

    def writers_of(self, field: str) -> tuple[Controller, ...]:
        """The controllers that write a field; more than one is an error that `validate` names."""
        return tuple(c for c in self._controllers if field in field_names(c, c.writes, "writes"))

    def readers_of(self, field: str) -> tuple[Controller, ...]:
        """The controllers whose forward run reads a field."""
        return tuple(c for c in self._controllers if field in field_names(c, c.reads, "reads"))

    def feeding(self, controller: Controller) -> tuple[Controller, ...]:
        """The controllers with an edge into `controller.input`."""
        return tuple(edge.source for edge in self.edges if edge.kind == "input" and edge.target is controller)

    def feedback_into(self, controller: Controller) -> tuple[Edge, ...]:
        """The edges into `controller.feedback`."""
        return tuple(edge for edge in self.edges if edge.kind == "feedback" and edge.target is controller)

    def upstream(self, controller: Controller) -> tuple[Controller, ...]:
        """Every controller that runs before this one because a path of input edges leads from it to this one."""
        found: set[Controller] = set()
        open_ends = [controller]
        while open_ends:
            for source in self.feeding(open_ends.pop()):
                if source not in found:
                    found.add(source)
                    open_ends.append(source)
        return tuple(known for known in self._controllers if known in found)

    def validate(
        self, sources: tuple[str, ...] = PROMPT_FIELDS, complete: bool = False, idle: tuple[Controller, ...] = ()
    ) -> None:
        """Check everything that can be known before running.

        Args:
            sources: fields that the batch starts with.
            complete: True once a trainer has added its own controllers. False leaves out what a trainer still adds:
                who writes the fields that are learned from, and the fields of `rlkit.dataflow.checks.TRAINER_FIELDS`.
            idle: controllers that do not run, because the batch starts with what they would write.

        Raises:
            DataflowError: two controllers of one name, a cycle of inputs, an unknown field, two writers of one field,
                a field nobody upstream writes, writer and reader of different shape or dtype, feedback into a
                controller that cannot learn, or feedback without the fields it needs.
        """
        check_dataflow(self, sources, complete, idle)

    def stages(self) -> list[list[Controller]]:
        """The controllers in levels: each runs after everything that leads into its input, those of a level together.

        Raises:
            DataflowError: input edges form a cycle.
        """
        cycle = find_cycle(self)
        if cycle:
            raise DataflowError(cycle_message(cycle))
        return self.levels()

    def levels(self) -> list[list[Controller]]:
        """Like `stages`, but never raises: a cycle is opened at its controller that was named first."""
        levels: list[list[Controller]] = []
        placed: set[Controller] = set()
        while len(placed) < len(self._controllers):
            waiting = [c for c in self._controllers if c not in placed]
            level = [c for c in waiting if placed.issuperset(self.feeding(c))] or waiting[:1]
            placed.update(level)
            levels.append(level)
        return levels

    def edge_fields(self, edge: Edge) -> tuple[str, ...]:
        """What an edge carries: the fields its target needs that its source writes, or else hands on from upstream."""
        target, source = edge.target, edge.source
        if edge.kind == "feedback":
            needed = field_names(target, target.learns_from, "learns_from")
        else:
            needed = field_names(target, target.reads, "reads")
        written = field_names(source, source.writes, "writes")
        own = tuple(name for name in needed if name in written)
        if own:
            return own
        handed_on = {n for c in self.upstream(source) for n in field_names(c, c.writes, "writes")}
        if edge.kind == "input":
            others = [c for c in self.feeding(target) if c is not source]
            handed_on -= {n for c in others for n in field_names(c, c.writes, "writes")}
        return tuple(name for name in needed if name in handed_on)

    def to_json(self) -> dict[str, Any]:
        """The graph as plain values, for `dataflow.json` and the widgets.

        Returns:
            `{"nodes": [{name, role, type, reads, writes, learns_from, device, heavy, streams, stage}], "edges": [{from,
            to, kind, fields, weight}]}`; `stage` counts from 0.
        """
        stage = {controller: index for index, level in enumerate(self.levels()) for controller in level}
        nodes = [
            {
                "name": c.name,
                "role": c.role,
                "type": type(c).__name__,
                "reads": list(field_names(c, c.reads, "reads")),
                "writes": list(field_names(c, c.writes, "writes")),
                "learns_from": list(field_names(c, c.learns_from, "learns_from")),
                "device": c.device if c.heavy else None,
                "heavy": c.heavy,
                "streams": c.streams,
                "stage": stage[c],
            }
            for c in self._controllers
        ]
        edges = [
            {
                "from": edge.source.name,
                "to": edge.target.name,
                "kind": edge.kind,
                "fields": list(self.edge_fields(edge)),
                "weight": edge.weight,
            }
            for edge in self.edges
        ]
        return {"nodes": nodes, "edges": edges}

    def to_svg(self) -> str:
        """The graph as an SVG document of its own: columns are stages, feedback edges are dashed."""
        return render_svg(self.to_json())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What a notebook shows: the drawing, or the stages in words where nothing can be drawn."""
        graph = self.to_json()
        return {"image/svg+xml": render_svg(graph), "text/plain": render_text(graph)}

    def __repr__(self) -> str:
        edges = ", ".join(str(edge) for edge in self.edges)
        return f"Dataflow({len(self)} controllers{': ' if edges else ''}{edges})"


def _port(value: object, place: str) -> Port:
    if isinstance(value, Port):
        return value
    if isinstance(value, Controller):
        port = f"{value.name}.output" if place == "first" else f"{value.name}.input"
        raise DataflowError(f"connect was given the controller {value.name!r} as its {place} port; write {port}")
    raise DataflowError(
        f"connect was given {value!r} as its {place} port; expected a port such as actor.output or reward.input"
    )


def _check_weight(source: Port, target: Port, weight: float) -> None:
    call = f"connect({source}, {target}, weight={weight!r})"
    if target.kind != "feedback":
        raise DataflowError(f"{call}: a weight is a share of feedback; leave it out for an input edge")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight < 0:
        raise DataflowError(f"{call}: a weight is a finite number that is not negative")


def _names(controllers: list[Controller]) -> str:
    return ", ".join(repr(controller.name) for controller in controllers) or "none"
