"""Triton kernels: several operations in one, for CUDA GPUs.

Every kernel has a plain counterpart elsewhere that computes the same, up to rounding: these keep float32 between the
operations that they join.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["available"]


def available(device: torch.device) -> bool:
    """Whether the kernels can run on a device: it is a CUDA GPU and Triton is installed."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
