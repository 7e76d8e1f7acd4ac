"""Where the tests of kernels run: on a GPU, or in Triton's interpreter on the CPU (`make kernels`)."""

import pytest
import torch

from rlkit.kernels import available

__all__ = ["CLOSE", "DEVICE", "needs_kernels"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(not available(DEVICE), reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
CLOSE = {torch.float32: 1e-5, torch.float16: 5e-3}
"""Bounds of results that round once to a dtype."""
if DEVICE.type == "cuda":  # Triton's interpreter (3.9) neither rounds to bfloat16 nor multiplies it
    CLOSE[torch.bfloat16] = 2e-2
