"""What can be wrong with a dataflow, found before anything runs. Every message names controllers, field and remedy."""

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlkit.controllers.base import Controller, field_names
from rlkit.errors import DataflowError
from rlkit.fields import FIELDS, Field, field_for

if TYPE_CHECKING:
    from rlkit.dataflow import Dataflow

__all__ = ["PROMPT_FIELDS", "TRAINER_FIELDS", "check_dataflow", "cycle_message", "field_specs", "find_cycle"]

PROMPT_FIELDS = ("input_ids", "attention_mask", "prompts", "groups", "rows", "columns")
"""What a batch of prompts holds before the first controller has run."""

TRAINER_FIELDS = (
    "rewards",
    "reward_valid",
    "logprobs",
    "ref_logprobs",
    "values",
    "token_rewards",
    "advantages",
    "returns",
    "preferences",
)
"""What the controllers that a trainer adds (mixer, reference, critic, advantage estimator) write."""


def check_dataflow(
    flow: "Dataflow", sources: tuple[str, ...], complete: bool, idle: tuple[Controller, ...] = ()
) -> None:
    """See `Dataflow.validate`."""
    if not len(flow):
        raise DataflowError("the dataflow is empty; connect(actor.output, reward.input) adds controllers to it")
    _check_names(flow)
    cycle = find_cycle(flow)
    if cycle:
        raise DataflowError(cycle_message(cycle))
    field_specs(flow, sources)
    _check_writers(flow, sources, idle)
    _check_producers(flow, sources, complete)
    _check_feedback(flow, sources, complete)


def find_cycle(flow: "Dataflow") -> list[Controller]:
    """The controllers along one cycle of input edges, each feeding the next and the last one the first; else empty."""
    finished: set[Controller] = set()
    path: list[Controller] = []

    def visit(controller: Controller) -> list[Controller]:
        if controller in path:
            return path[path.index(controller) :]
        if controller in finished:
            return []
        path.append(controller)
        for edge in flow.edges:
            if edge.kind == "input" and edge.source is controller:
                cycle = visit(edge.target)
                if cycle:
                    return cycle
        path.pop()
        finished.add(controller)
        return []

    for controller in flow.controllers:
        cycle = visit(controller)
        if cycle:
            return cycle
    return []


def cycle_message(cycle: list[Controller]) -> str:
    """What to say about a cycle that `find_cycle` found."""
    names = " -> ".join(controller.name for controller in [*cycle, cycle[0]])
    last, first = cycle[-1].name, cycle[0].name
    return (
        f"input edges form a cycle, so that nothing in it can run first: {names}; "
        f"close the loop through a feedback port, for example connect({last}.output, {first}.feedback)"
    )


def field_specs(flow: "Dataflow", sources: tuple[str, ...]) -> dict[str, Field]:
    """What each field of the dataflow holds: as rlkit knows it, or as the controllers declare it.

    Raises:
        DataflowError: a field that nobody declares, or that two declare differently.
    """
    specs: dict[str, Field] = {}
    declared_by: dict[str, str] = {}
    for controller, verb, field in _declarations(flow):
        if isinstance(field, str):
            continue
        known = specs.get(field.name) or field_for(field.name)
        if known is not None and (known.dims, known.dtype) != (field.dims, field.dtype):
            other = declared_by.get(field.name, "rlkit itself declares")
            raise DataflowError(
                f"field {field.name!r}: controller '{controller.name}' {verb} it as {_shape(field)}, but {other} it as "
                f"{_shape(known)}; make the two declarations agree, or give one of the fields another name"
            )
        specs[field.name] = known or field
        declared_by.setdefault(field.name, f"controller '{controller.name}' {verb}")
    for controller, verb, field in _declarations(flow):
        if isinstance(field, str) and field not in specs:
            spec = field_for(field)
            if spec is None:
                raise DataflowError(_unknown_field(controller, verb, field, [*specs, *sources]))
            specs[field] = spec
    for name in sources:
        spec = field_for(name)
        if name not in specs and spec is not None:
            specs[name] = spec
    return specs


def _declarations(flow: "Dataflow") -> Iterator[tuple[Controller, str, str | Field]]:
    """Every (controller, "writes" | "reads" | "learns from", field) of the graph, writers first."""
    for controller in flow.controllers:
        field_names(controller, controller.writes, "writes")
        for field in controller.writes:
            yield controller, "writes", field
    for controller in flow.controllers:
        field_names(controller, controller.reads, "reads")
        field_names(controller, controller.learns_from, "learns_from")
        for field in controller.reads:
            yield controller, "reads", field
        for name in controller.learns_from:
            yield controller, "learns from", name


def _shape(field: Field) -> str:
    return f"({', '.join(field.dims)}) {field.dtype}"


def _unknown_field(controller: Controller, verb: str, name: str, declared: list[str]) -> str:
    near = difflib.get_close_matches(name, [*declared, *FIELDS], n=1)
    hint = f"did you mean {near[0]!r}? Otherwise " if near else ""
    return (
        f"controller '{controller.name}' {verb} the unknown field {name!r}; {hint}declare what it holds: "
        f'Field({name!r}, ("B",), "float32", "what it holds") in the writes of the controller that makes it'
    )


def _check_names(flow: "Dataflow") -> None:
    seen: dict[str, Controller] = {}
    for controller in flow.controllers:
        other = seen.setdefault(controller.name, controller)
        if other is not controller:
            raise DataflowError(
                f"two controllers are named '{controller.name}' ({type(other).__name__} and "
                f"{type(controller).__name__}); give one of them name=..., and when a notebook cell was run again, "
                "build the Dataflow anew too"
            )


def _check_writers(flow: "Dataflow", sources: tuple[str, ...], idle: tuple[Controller, ...]) -> None:
    for controller in flow.controllers:
        if controller in idle:
            continue
        names = field_names(controller, controller.writes, "writes")
        for name in names:
            if name in sources:
                raise DataflowError(
                    f"controller '{controller.name}' writes the field {name!r}, which the batch of prompts already "
                    "holds; write a field of another name"
                )
            others = [c.name for c in flow.writers_of(name) if c is not controller]
            if others or names.count(name) > 1:
                both = f"controllers '{controller.name}' and '{others[0]}'" if others else f"'{controller.name}' twice"
                raise DataflowError(
                    f"field {name!r} has two writers: {both}; a field has one writer, so rename one of the fields "
                    "or take one of the controllers out"
                )


def _check_producers(flow: "Dataflow", sources: tuple[str, ...], complete: bool) -> None:
    for controller in flow.controllers:
        upstream = flow.upstream(controller)
        at_hand = {*sources, *(n for c in upstream for n in field_names(c, c.writes, "writes"))}
        for name in field_names(controller, controller.reads, "reads"):
            if name in at_hand:
                continue
            writers = flow.writers_of(name)
            if not writers and not complete and name in TRAINER_FIELDS:
                continue
            raise DataflowError(
                f"controller '{controller.name}' reads {name!r}, but " + _remedy(name, writers, controller, "input")
            )


def _remedy(name: str, writers: tuple[Controller, ...], reader: Controller, port: str) -> str:
    """Second half of a message: who writes a missing field, if anybody, and the edge to add."""
    if not writers:
        return (
            f"no controller writes it and the batch does not start with it; add a controller that writes {name!r} "
            f"and connect its output to {reader.name}.{port}"
        )
    writer = writers[0]
    if writer is reader:
        return "only writes it itself; take it out of its reads"
    return (
        f"'{writer.name}', which writes it, does not lead there: "
        f"add connect({writer.name}.output, {reader.name}.{port})"
    )


def _check_feedback(flow: "Dataflow", sources: tuple[str, ...], complete: bool) -> None:
    for controller in flow.controllers:
        edges = flow.feedback_into(controller)
        if not edges:
            continue
        needed = field_names(controller, controller.learns_from, "learns_from")
        givers = [edge.source for edge in edges]
        if not needed:
            raise DataflowError(
                f"feedback from '{givers[0].name}' leads into '{controller.name}' ({type(controller).__name__}), "
                "which cannot learn: its learns_from is empty; take the edge out, or use a controller that learns"
            )
        if complete:
            _check_learnable(flow, controller, givers, needed, sources)


def _check_learnable(
    flow: "Dataflow",
    controller: Controller,
    givers: list[Controller],
    needed: tuple[str, ...],
    sources: tuple[str, ...],
) -> None:
    """Every field learned from is written by a giver of feedback, by something upstream of one, or by the learner."""
    reached = {controller, *flow.upstream(controller), *givers, *(c for giver in givers for c in flow.upstream(giver))}
    at_hand = {*sources, *(name for c in reached for name in field_names(c, c.writes, "writes"))}
    for name in needed:
        if name not in at_hand:
            from_whom = " and ".join(f"'{giver.name}'" for giver in givers)
            raise DataflowError(
                f"controller '{controller.name}' learns from {name!r} and gets feedback from {from_whom}, but "
                + _remedy(name, flow.writers_of(name), controller, "feedback")
            )
