"""Memory of the process and of the GPUs, as metrics. Reads only what is there: no GPU, no GPU keys."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import psutil

_MB = 1e6


def memory(devices: Mapping[str, str] | None = None) -> dict[str, float]:
    """Memory in use now, in MB (1e6 bytes).

    Args:
        devices: role -> its device, e.g. {"actor": "cuda:0", "critic": "cuda:0"}. Roles on the CPU are left out.

    Returns:
        "memory/process_rss_mb": resident memory of this process;
        "memory/<role>_gpu_mem_mb": memory that this process holds on the role's GPU. Roles on one GPU share it, so
        they report the same number;
        "memory/gpu<i>_used_mb": memory that all processes use on GPU i, when the driver library can be asked.
    """
    found = {"memory/process_rss_mb": psutil.Process().memory_info().rss / _MB}
    torch: Any = sys.modules.get("torch")
    if torch is None or not devices or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return found
    held: dict[int, float] = {}
    for role, name in devices.items():
        device = torch.device(name)
        if device.type != "cuda":
            continue
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in held:
            held[index] = torch.cuda.memory_reserved(index) / _MB
        found[f"memory/{role}_gpu_mem_mb"] = held[index]
    for index in held:
        with contextlib.suppress(RuntimeError):
            free, total = torch.cuda.mem_get_info(index)
            found[f"memory/gpu{index}_used_mb"] = (total - free) / _MB
    return found
