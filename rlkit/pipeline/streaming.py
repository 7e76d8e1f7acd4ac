"""Rows of a batch that are read as soon as they are finished, and put back in their order.

Shape letters: B rollouts, P prompt width, T response width, L = P + T.
"""

from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from rlkit.batch import RolloutBatch
from rlkit.controllers.base import FieldValues
from rlkit.errors import DataError, DataflowError
from rlkit.fields import Field
from rlkit.pipeline.threads import Stopped

__all__ = ["StreamReader", "check_emitted"]

Chunk = tuple[list[int], FieldValues]
"""Rows, and what their producer handed over for them."""

Piece = tuple[list[int], Mapping[str, Any]]
"""Rows, and the checked columns of these rows."""


def check_emitted(
    writes: Sequence[str], size: int, seen: set[int], indices: Sequence[int], fields: FieldValues
) -> list[int]:
    """The rows of a call of `emit`, checked; `seen` (the rows handed over before) takes them in.

    Raises:
        DataflowError: a row outside the batch or handed over twice, a field the producer does not declare, or a field
            whose length is not the number of rows.
    """
    rows = [int(index) for index in indices]
    for row in rows:
        if not 0 <= row < size:
            raise DataflowError(f"emitted row {row}; the batch has rows 0 to {size - 1}")
        if row in seen:
            raise DataflowError(f"emitted row {row} twice; emit each row once, when it is finished")
        seen.add(row)
    for name, values in fields.items():
        if name not in writes:
            raise DataflowError(
                f"emitted the field {name!r}, which is not in its writes ({', '.join(writes)}); declare it there"
            )
        if len(values) != len(rows):
            raise DataflowError(f"emitted {len(rows)} rows, but {len(values)} values of {name!r}; give one value a row")
    return rows


class StreamReader:
    """One controller that reads finished rows while their producer still works on others.

    Args:
        producer: its name, for errors.
        start: what the reader sees before the producer has run, every row.
        reads: the producer's fields that the reader reads.
        specs: description per field.
    """

    def __init__(
        self,
        producer: str,
        start: RolloutBatch,
        reads: Sequence[str],
        specs: Mapping[str, Field],
    ) -> None:
        self._producer = producer
        self._start = start
        self._reads = tuple(reads)
        self._specs = specs
        self._inbox: SimpleQueue[Chunk | RolloutBatch | None] = SimpleQueue()

    def put(self, rows: list[int], fields: FieldValues) -> None:
        """Hand over finished rows. Rows that lack a field the reader needs are read once the producer is done."""
        if rows and all(name in fields for name in self._reads):
            self._inbox.put((rows, {name: fields[name] for name in self._reads}))

    def close(self, whole: RolloutBatch) -> None:
        """Tell that the producer is done; `whole` is what the reader sees of the full batch."""
        self._inbox.put(whole)

    def stop(self) -> None:
        """Make `run` raise `Stopped` instead of waiting for rows."""
        self._inbox.put(None)

    def run(self, call: Callable[[RolloutBatch], Mapping[str, Any]]) -> dict[str, Any]:
        """Call the controller on rows as they come, and on what is left at the end.

        Returns:
            Its columns for every row, in the order of the batch.

        Raises:
            Stopped: the run was stopped.
            DataError: what the producer handed over does not fit the fields' description.
        """
        pieces: list[Piece] = []
        while not isinstance(chunks := self._take(), RolloutBatch):
            rows = [row for chunk_rows, _ in chunks for row in chunk_rows]
            parts = [self._rows(chunk_rows, fields) for chunk_rows, fields in chunks]
            pieces.append((rows, call(RolloutBatch.cat(parts) if len(parts) > 1 else parts[0])))
            del parts
        whole = chunks
        read = {row for rows, _ in pieces for row in rows}
        rest = [row for row in range(whole.batch_size) if row not in read]
        if rest or not pieces:
            pieces.append((rest, call(whole.select(rest) if read else whole)))
        return {name: assemble(self._specs[name], name, pieces, whole) for name in pieces[0][1]}

    def _take(self) -> list[Chunk] | RolloutBatch:
        """Every chunk that waits; or the whole batch, once the producer is done, with the chunks not read yet."""
        chunks: list[Chunk] = []
        while True:
            message = self._inbox.get()
            if message is None:
                raise Stopped
            if isinstance(message, RolloutBatch):
                return message
            chunks.append(message)
            if self._inbox.empty():
                return chunks

    def _rows(self, rows: list[int], fields: FieldValues) -> RolloutBatch:
        try:
            return self._start.select(rows).with_fields(fields, [self._specs[name] for name in self._reads])
        except DataError as error:
            raise DataError(f"the rows that '{self._producer}' emitted do not fit: {error}") from error


def assemble(spec: Field, name: str, pieces: Sequence[Piece], whole: RolloutBatch) -> Any:
    """One column (B, ...) from pieces by row. Pieces with a narrower response block are filled up with 0 on the right.

    Args:
        spec: description of the column.
        name: its key in the pieces.
        pieces: cover every row of `whole` once.
        whole: the full batch, which says how wide the response block is.
    """
    if not spec.is_tensor:
        column: list[Any] = [None] * whole.batch_size
        for rows, values in pieces:
            for row, value in zip(rows, values[name], strict=True):
                column[row] = value
        return column
    widths = [max(values[name].shape[axis] for _, values in pieces) for axis in range(1, len(spec.dims))]
    for axis, letter in enumerate(spec.dims[1:]):
        if letter in ("T", "L"):
            widths[axis] = whole.response_width + (whole.prompt_width if letter == "L" else 0)
    result = pieces[0][1][name].new_zeros((whole.batch_size, *widths))
    for rows, values in pieces:
        block = values[name]
        where = (torch.tensor(rows, dtype=torch.int64, device=block.device), *(slice(0, w) for w in block.shape[1:]))
        result[where] = block
    return result
