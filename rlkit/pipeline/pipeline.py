"""Runs a dataflow on a batch: what is independent runs at the same time, and finished rows are read early.

Which controllers run at once follows from the graph alone. A controller with nothing beside it runs in the thread that
called `Pipeline.run`, so that debuggers, profilers and interrupts behave as if it had been called directly.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rlkit.batch import RolloutBatch
from rlkit.controllers.base import Controller, field_names
from rlkit.dataflow import Dataflow
from rlkit.dataflow.checks import PROMPT_FIELDS, field_specs
from rlkit.errors import DataflowError
from rlkit.pipeline.execution import Execution, Task
from rlkit.pipeline.failures import StageError

__all__ = ["Pipeline", "SpanTracker", "StageError"]


class SpanTracker(Protocol):
    """What the pipeline needs of a metrics tracker: `with tracker.span(name): ...`, from any thread."""

    def span(self, name: str, rank: int = 0) -> AbstractContextManager[Any]: ...


class Pipeline:
    """A checked dataflow, ready to run batch after batch.

    Independent controllers run at the same time in threads; heavy ones (`Controller.heavy`) of one device one after the
    other. A controller with `streams=True` whose reads all come from one producer is called with rows as that producer
    finishes them. Neither changes a result. Every controller runs without gradients and sees the fields that the batch
    starts with and those it declares to read.

    Args:
        dataflow: taken as it is now; later changes to it do not reach the pipeline.
        tracker: gets a span per controller and call, named after the controller; None records nothing.
        sources: fields that every batch starts with.
        idle: controllers that only learn here: the batch starts with what they would write, as offline data does.

    Raises:
        DataflowError: the dataflow cannot run, see `Dataflow.validate`.
    """

    def __init__(
        self,
        dataflow: Dataflow,
        tracker: SpanTracker | None = None,
        sources: Sequence[str] = PROMPT_FIELDS,
        idle: Sequence[Controller] = (),
    ) -> None:
        self.sources = tuple(sources)
        dataflow.validate(self.sources, complete=True, idle=tuple(idle))
        self.dataflow = dataflow.copy()
        self.tracker = tracker
        self._specs = field_specs(self.dataflow, self.sources)
        self._tasks = _plan(self.dataflow, set(idle))

    def run(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch with the fields of every controller.

        Args:
            batch: holds at least those of `sources` that a controller reads, and none that a controller writes.

        Returns:
            A new batch: the given fields, then those written, in the order of the stages.

        Raises:
            DataflowError: the batch lacks a field or already holds one, or a controller returned other fields than it
                declares.
            RlkitError: a controller failed. The message names it; an error of rlkit keeps its class, any other becomes
                a StageError, and the original is chained.
        """
        self._check_start(batch)
        execution = Execution(self._tasks, self._specs, self.tracker, batch)
        del batch
        try:
            return execution.run()
        finally:
            execution.release()

    def _check_start(self, batch: RolloutBatch) -> None:
        for task in self._tasks:
            name = task.controller.name
            for field in task.writes:
                if field in batch:
                    raise DataflowError(
                        f"the batch already holds {field!r}, which controller '{name}' writes; start from a batch "
                        f"without it"
                    )
            for field in task.reads:
                if field not in batch and not self.dataflow.writers_of(field):
                    raise DataflowError(
                        f"controller '{name}' reads {field!r}, which the batch lacks; it starts with "
                        f"{', '.join(batch.names)}: add the field, or leave it out of the pipeline's sources"
                    )


def _plan(flow: Dataflow, idle: set[Controller]) -> tuple[Task, ...]:
    """One task a controller that runs, in the order of the stages."""
    order = [controller for stage in flow.stages() for controller in stage if controller not in idle]
    writes = {c: field_names(c, c.writes, "writes") for c in order}
    tasks = []
    for controller in order:
        reads = field_names(controller, controller.reads, "reads")
        feeding = [source for source in flow.feeding(controller) if source not in idle]
        producer = None
        if controller.streams:
            for candidate in feeding:
                before = flow.upstream(candidate)
                follows = all(other is candidate or other in before for other in feeding)
                if follows and any(name in writes[candidate] for name in reads):
                    producer = candidate
        tasks.append(Task(controller, reads, writes[controller], frozenset(feeding), producer))
    return tuple(tasks)
