"""CUDA graphs of one computation at several sizes, kept by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkit.engines.budget import is_out_of_memory

__all__ = ["Graphs"]


class Graphs:
    """Captures what it is asked to run, and replays it when asked again under the same name.

    Args:
        device: of the computation.
        what: named in a warning when it cannot be captured.
        active: False runs everything as it is.
    """

    def __init__(self, device: torch.device, what: str, active: bool) -> None:
        self.device, self.what, self.active = device, what, active
        self.captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen = set[Hashable]()
        self._pool: Any = None

    def has(self, name: Hashable) -> bool:
        """Whether it would be replayed."""
        return name in self.captured

    def run(
        self, name: Hashable, compute: Callable[[], None], changing: Sequence[Tensor] = (), at_first: bool = True
    ) -> None:
        """Computes once.

        Args:
            name: of this size; the tensors that `compute` reads lie at the same addresses whenever it comes.
            compute: what to do; it may do what a graph cannot hold, such as asking the host for a number, and is then
                run as it is from now on.
            changing: all that it changes, put back after warming up; what it writes again as before may be left out.
            at_first: False captures when a name comes for the second time, for what may never come again.
        """
        graph = self.captured.get(name)
        if graph is None and self.active and (at_first or name in self._seen):
            try:
                graph = self.captured[name] = self._capture(compute, changing)
            except RuntimeError as error:
                if any(is_out_of_memory(cause) for cause in _chain(error)):
                    raise
                self._go_on_without(error)
        elif graph is None:
            self._seen.add(name)
        if graph is None:
            compute()
        else:
            graph.replay()

    def clear(self) -> None:
        """Gives up the graphs and their memory."""
        self.captured.clear()
        self._seen.clear()
        self._pool = None

    def _capture(self, compute: Callable[[], None], changing: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        before = [tensor.clone() for tensor in changing]
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.device)
        stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        try:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                compute()
            current.wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool):
                compute()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own in force
            for tensor, value in zip(changing, before, strict=True):
                tensor.copy_(value)
        return graph

    def _go_on_without(self, error: RuntimeError) -> None:
        self.active = False
        self.clear()
        warnings.warn(
            f"{self.what} cannot be captured as a CUDA graph ({error}); what it computes is the same without, and "
            "takes longer",
            RuntimeWarning,
            stacklevel=3,
        )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it was raised while handling."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
