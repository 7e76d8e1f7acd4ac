"""Triton kernels: several operations in one, for CUDA GPUs. With TRITON_INTERPRET=1 they run on the CPU, for tests.

Every kernel has a plain counterpart elsewhere that computes the same, up to rounding: these keep float32 between the
operations that they join.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rlkit.env import kernels_are_interpreted

__all__ = ["available", "on_device_of"]


def available(device: torch.device) -> bool:
    """Whether the kernels can run on a device: it is a CUDA GPU of compute capability 8 (bfloat16) or later, or they
    are interpreted; and Triton is installed."""
    return _has_triton() and (_suits(device) if device.type == "cuda" else kernels_are_interpreted())


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Within it, kernels are launched on the GPU where a tensor is."""
    return torch.cuda.device_of(x)


@cache
def _suits(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
