"""Which row comes next: shuffled epochs over a fixed set of rows, exactly resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from rlkit.errors import CheckpointError, ConfigError, DataError

__all__ = ["Epochs", "RowSource", "fingerprint"]

Row = TypeVar("Row")


class Epochs:
    """Draws row numbers: every row once an epoch, in an order that seed and epoch decide.

    Args:
        count: number of rows, at least 1.
        seed: decides the order, 0 or more.
        fingerprint: identifies the rows, so that a state is not loaded onto others.
        shuffle: false keeps the rows in order in every epoch.
        what: what the rows are, for messages.

    Raises:
        ConfigError: a negative seed.
        DataError: no rows.
    """

    def __init__(self, count: int, seed: int, fingerprint: str, *, shuffle: bool = True, what: str = "prompt") -> None:
        if seed < 0:
            raise ConfigError(f"the seed of a {what} source must be 0 or more, given {seed}")
        if count < 1:
            raise DataError(f"the {what} source is empty; expected at least one {what}")
        self._count, self._seed, self._shuffle, self._what = count, seed, shuffle, what
        self.fingerprint = fingerprint
        """16 hex digits that change with the rows."""
        self._epoch = self._position = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._epoch

    def next(self, n: int) -> list[int]:
        """The next `n` row numbers, going on into further epochs where one ends.

        Raises:
            ConfigError: `n` is less than 1.
        """
        if n < 1:
            raise ConfigError(f"expected to draw at least one {self._what}, given {n}")
        drawn: list[int] = []
        while len(drawn) < n:
            taken = self._order[self._position : self._position + n - len(drawn)]
            drawn += taken
            self._position += len(taken)
            if self._position == self._count:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return drawn

    def _order_of(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._count))
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(self._count).tolist()
        return order

    def state_dict(self) -> dict[str, Any]:
        """{"epoch", "position", "seed", "shuffle", "fingerprint"}: plain values that say which row comes next."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the state was taken, with its seed and order.

        Raises:
            CheckpointError: other keys than `state_dict` gives.
            DataError: the state belongs to other rows.
        """
        if odd := sorted(set(state) ^ set(self.state_dict())):
            raise CheckpointError(
                f"the state of a {self._what} source must have the keys of state_dict(); it differs in {odd}"
            )
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the state was saved with other {self._what}s (fingerprint {state['fingerprint']}) than these "
                f"{self._count} (fingerprint {self.fingerprint}). Give the same {self._what}s in the same order, or "
                "start a new run"
            )
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)


class RowSource(Generic[Row]):
    """Rows drawn in shuffled epochs; what prompts and pairs share once they are read."""

    rows: list[Row]
    """Every row, in the order of the source."""

    def __init__(self, rows: list[Row], epochs: Epochs) -> None:
        self.rows, self._epochs = rows, epochs

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._epochs.epoch

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the rows."""
        return self._epochs.fingerprint

    def next(self, n: int) -> list[Row]:
        """The next `n` rows, going on into further epochs where one ends.

        Raises:
            ConfigError: `n` is less than 1.
        """
        return [self.rows[index] for index in self._epochs.next(n)]

    def state_dict(self) -> dict[str, Any]:
        """Which row comes next, as plain values; see `Epochs.state_dict`."""
        return self._epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the state was taken, with its seed and order.

        Raises:
            CheckpointError: other keys than `state_dict` gives.
            DataError: the state belongs to other rows.
        """
        self._epochs.load_state_dict(state)


def fingerprint(rows: Iterable[Any]) -> str:
    """16 hex digits that change with the rows (JSON values; anything else counts by its type)."""
    digest = hashlib.sha256()
    for row in rows:
        line = json.dumps(row, default=lambda value: type(value).__name__, skipkeys=True)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:16]
