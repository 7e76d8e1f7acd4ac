"""The base of every role: what it reads and writes, its ports, where it lives, how it is run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlkit.device_map import DeviceMap
from rlkit.errors import CheckpointError, DataflowError, PlacementError
from rlkit.fields import Field

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.batch import RolloutBatch

__all__ = ["Controller", "Emit", "FieldValues", "Port", "PortKind", "field_names"]

PortKind = Literal["input", "output", "feedback"]

FieldValues = Mapping[str, "Tensor | Sequence[Any]"]
"""Field name -> its values, one entry a row, rows first: a tensor, or a list for text and object fields."""

Emit = Callable[[list[int], FieldValues], None]
"""`emit(indices, fields)`: these rows of the batch are finished, and `fields` holds their values in that order."""


@dataclass(frozen=True)
class Port:
    """One end of a connection: `actor.output`, `reward.input`, `critic.feedback`."""

    controller: "Controller"
    kind: PortKind

    def __repr__(self) -> str:
        return f"{self.controller.name}.{self.kind}"


class Controller(ABC):
    """One role of a dataflow: it reads fields of a batch and writes others.

    Subclass it for a role of your own:

        class Brevity(Controller):
            reads = ("response_mask",)
            writes = (Field("brevity", ("B",), "float32", "1 / response length"),)
            streams = True
            heavy = False

            def run(self, batch):
                return {"brevity": 1.0 / batch["response_mask"].sum(-1).clamp(min=1).float()}

    `run` sees the fields that the batch started with and those named in `reads`, and returns exactly those in
    `writes`. It may be called from a worker thread, without gradients; randomness must come from a generator of its own
    for a run to repeat, since independent controllers run at the same time.
    """

    role: str = "custom"
    """What the controller is in the graph: "actor", "critic", "reward", "reference", or a name of your own."""
    reads: tuple[str | Field, ...] = ()
    """Batch fields that `run` needs; a `Field` instead of a name also states the shape and dtype it expects."""
    writes: tuple[str | Field, ...] = ()
    """Batch fields that `run` returns. A field that rlkit does not know is declared by a `Field`."""
    learns_from: tuple[str, ...] = ()
    """Batch fields that the feedback port needs; empty for a controller that cannot learn."""
    streams: bool = False
    """True when `run` gives a row the same result in any subset of rows: it is then called early with finished rows."""
    heavy: bool = True
    """True when `run` computes on the controller's device: heavy controllers of one device run one at a time."""

    def __init__(self, name: str | None = None) -> None:
        """Name the controller.

        Args:
            name: unique in a dataflow, shown in errors, spans and the drawing; None takes the role.

        Raises:
            DataflowError: the name is not a non-empty string.
        """
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise DataflowError(f"{type(self).__name__}(name={name!r}): a name is a non-empty string")
        self._name = name

    @property
    def name(self) -> str:
        """The name given, else the role."""
        return getattr(self, "_name", None) or self.role

    @property
    def input(self) -> Port:
        """Where other controllers' fields come in; edges into it order the forward run."""
        return Port(self, "input")

    @property
    def output(self) -> Port:
        """Where this controller's fields go out."""
        return Port(self, "output")

    @property
    def feedback(self) -> Port:
        """Where what it learns from comes in; edges into it close loops."""
        return Port(self, "feedback")

    @property
    def device_map(self) -> DeviceMap:
        """Where the controller lives; the first GPU, or the CPU where there is none, until set."""
        device_map: DeviceMap | None = getattr(self, "_device_map", None)
        return DeviceMap.default() if device_map is None else device_map

    @device_map.setter
    def device_map(self, device_map: DeviceMap) -> None:
        if not isinstance(device_map, DeviceMap):
            raise PlacementError(
                f"{self.name}.device_map = {device_map!r}: expected a DeviceMap, "
                "for example DeviceMap('single', devices='cuda:0')"
            )
        self._device_map = device_map
        self.placed(device_map)

    @property
    def device(self) -> str:
        """The device that tensors for this controller go to, e.g. `"cuda:0"`."""
        return self.device_map.primary

    def placed(self, device_map: DeviceMap) -> None:  # noqa: B027 - a hook that most roles leave as it is
        """Called after `device_map` was set; a role with a model moves it here."""

    @abstractmethod
    def run(self, batch: "RolloutBatch") -> FieldValues:
        """Compute the fields named in `writes` for every row of `batch`."""

    def run_streaming(self, batch: "RolloutBatch", emit: Emit) -> FieldValues:
        """Like `run`, and hands over rows as they finish.

        Override it in a producer that finishes some rows earlier than others. Call `emit(indices, fields)` at most once
        for a row, with tensors that are not written to afterwards; rows never emitted are handed on at the end. `emit`
        raises when the pipeline has been stopped: let it pass.

        Returns:
            The fields of every row, as `run` does.
        """
        return self.run(batch)

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes while training; nothing by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            CheckpointError: the state holds keys that this controller does not have.
        """
        if state:
            raise CheckpointError(
                f"controller '{self.name}' ({type(self).__name__}) keeps no state, but was given {sorted(state)}; "
                "load the state of the same controller, or override load_state_dict"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, role={self.role!r})"


def field_names(controller: Controller, fields: Sequence[str | Field], attribute: str) -> tuple[str, ...]:
    """The names in a declaration such as `controller.reads`.

    Raises:
        DataflowError: the declaration is one string, or holds something that is neither a name nor a Field.
    """
    if isinstance(fields, str):
        raise DataflowError(
            f"controller '{controller.name}': {attribute} = {fields!r} is one string; write a tuple: ({fields!r},)"
        )
    names = []
    for field in fields:
        if not isinstance(field, str | Field):
            raise DataflowError(
                f"controller '{controller.name}': {attribute} holds {field!r}; "
                "expected field names or rlkit.batch.Field objects"
            )
        names.append(field if isinstance(field, str) else field.name)
    return tuple(names)
