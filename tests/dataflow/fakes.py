"""Small controllers for tests of dataflows and pipelines: no model, results that can be worked out by hand."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from rlkit.batch import Field, RolloutBatch
from rlkit.controllers.base import Controller, Emit
from rlkit.dataflow import Dataflow

DOUBLE = Field("double", ("B",), "float32", "twice the number of sampled tokens")


def prompts(size: int = 4, width: int = 3) -> RolloutBatch:
    """`size` prompts of `width` real tokens; row i holds the ids 10 i, 10 i + 1, ..."""
    ids = 10 * torch.arange(size)[:, None] + torch.arange(width)[None]
    return RolloutBatch(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids, dtype=torch.bool),
            "prompts": [f"prompt {row}" for row in range(size)],
            "groups": torch.arange(size) // 2,
            "rows": torch.arange(size),
            "columns": [{"row": row} for row in range(size)],
        }
    )


def answers(batch: RolloutBatch) -> dict[str, Any]:
    """What the fake actor writes: row i gets i + 1 tokens, which repeat the row's first id plus their position."""
    lengths = batch["input_ids"][:, 0] // 10 + 1
    width = int(lengths.max()) if len(lengths) else 0
    position = torch.arange(width)[None]
    mask = position < lengths[:, None]
    tokens = (batch["input_ids"][:, :1] + position) * mask
    return {
        "generated_ids": torch.cat([batch["input_ids"], tokens], dim=1),
        "response_mask": mask,
        "responses": ["x" * int(length) for length in lengths],
    }


class Actor(Controller):
    """Answers without streaming."""

    role = "actor"
    reads = ("input_ids", "attention_mask")
    writes = ("generated_ids", "response_mask", "responses")
    learns_from = ("advantages",)

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        return answers(batch)


class StreamingActor(Actor):
    """Hands over `chunks` of rows, calling `between(chunk)` after each, and returns all rows at the end."""

    def __init__(self, chunks: Sequence[Sequence[int]], between: Callable[[Sequence[int]], None] = lambda rows: None):
        super().__init__()
        self.chunks = chunks
        self.between = between
        self.emitted: tuple[str, ...] = self.writes

    def run_streaming(self, batch: RolloutBatch, emit: Emit) -> Mapping[str, Any]:
        for rows in self.chunks:
            fields = answers(batch.select(list(rows)))
            emit(list(rows), {name: fields[name] for name in self.emitted})
            self.between(rows)
        return self.run(batch)


class Step(Controller):
    """A controller with declarations and a function given from outside."""

    heavy = False

    def __init__(
        self,
        name: str,
        reads: Sequence[str | Field] = (),
        writes: Sequence[str | Field] = (),
        fn: Callable[[RolloutBatch], Any] = lambda batch: {},
        *,
        role: str = "custom",
        learns_from: Sequence[str] = (),
        streams: bool = False,
        heavy: bool = False,
    ) -> None:
        super().__init__(name)
        self.role = role
        self.reads, self.writes = tuple(reads), tuple(writes)
        self.learns_from = tuple(learns_from)
        self.streams, self.heavy = streams, heavy
        self.fn = fn

    def run(self, batch: RolloutBatch) -> Any:
        return self.fn(batch)


def length_reward(name: str = "length", **options: Any) -> Step:
    """A light, streaming reward: the response length."""

    def score(batch: RolloutBatch) -> dict[str, Any]:
        return {f"reward/{name}": torch.tensor([float(len(text)) for text in batch["responses"]])}

    options = {"streams": True, "role": "reward", **options}
    return Step(name, ("prompts", "responses"), (f"reward/{name}",), score, **options)


def chain(*controllers: Controller) -> Dataflow:
    """Each controller feeds the next."""
    flow = Dataflow().add(*controllers)
    for source, target in pairwise(controllers):
        flow.connect(source.output, target.input)
    return flow


class Spans:
    """A tracker that keeps the names of spans, in the order they were opened."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.lock = threading.Lock()

    @contextmanager
    def span(self, name: str, rank: int = 0) -> Any:
        with self.lock:
            self.names.append(name)
        yield
