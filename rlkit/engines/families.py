"""What a module of transformers is, where its computation is written out elsewhere."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn

__all__ = ["gates_by_silu", "is_one_of"]


def is_one_of(module: nn.Module, names: Container[str]) -> bool:
    """Whether a module is of one of these classes of transformers itself: others may compute something else."""
    kind = type(module)
    return kind.__name__ in names and kind.__module__.startswith("transformers.models.")


def gates_by_silu(mlp: Any) -> bool:
    """Whether the gate of a decoder layer's MLP is a SiLU."""
    return type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
