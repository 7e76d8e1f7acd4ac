"""What generators of tests share: they have no weights of their own, so there is nothing to sync or to give up."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from rlkit.generation.base import Synced


class WithoutWeights:
    """The parts of a `Generator` beside `generate`."""

    def sync(self, model: nn.Module, version: Hashable) -> Synced:
        return Synced()

    def sleep(self) -> None: ...
    def spare(self) -> bool:
        return False

    def release(self) -> None: ...
