"""Float32 master weights under parameters in half precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MASTER", "MasterWeights", "round_parameters"]

MASTER = "master"
"""Name of the master weight among a parameter's optimizer slots."""
_HALF = (torch.bfloat16, torch.float16)


def round_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts a module's floating-point parameters in place. Buffers stay: rotary frequencies need their precision."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


class MasterWeights:
    """For each parameter in half precision a float32 weight that is trained in its place.

    Args:
        parameters: by name. Those in full precision are their own masters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._link([(p, nn.Parameter(p.detach().float())) for p in parameters.values() if p.dtype in _HALF])

    def _link(self, pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self.pairs = pairs
        self._master = {id(p): master for p, master in pairs}
        self._versions = self._now()

    def __getstate__(self) -> dict[str, Any]:
        return {"pairs": self.pairs}  # ids belong to a process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._link(state["pairs"])

    def _now(self) -> list[int]:
        return [p._version for p, _ in self.pairs]

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer updates for a parameter."""
        return self._master.get(id(parameter), parameter)

    def take_gradients(self) -> None:
        """Adds the parameters' gradients to those of the masters, and drops them."""
        totals, parts = [], []
        for parameter, master in self.pairs:
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                totals.append(master.grad)
                parts.append(parameter.grad)
            parameter.grad = None
        if totals:
            torch._foreach_add_(totals, parts)

    def drop_gradients(self) -> None:
        """Drops gradients that were left on the parameters themselves."""
        for parameter, _ in self.pairs:
            parameter.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Writes the masters, rounded, into the parameters."""
        if self.pairs:
            torch._foreach_copy_([p for p, _ in self.pairs], [master for _, master in self.pairs])
        self._versions = self._now()

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Takes over parameters that somebody else wrote since the last rounding (weights that were loaded)."""
        now = self._now()
        for (parameter, master), before, version in zip(self.pairs, self._versions, now, strict=True):
            if version != before:
                master.copy_(parameter)
        self._versions = now

    def slot(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The master weight under its name, for a parameter that has one."""
        master = self._master.get(id(parameter))
        return {} if master is None else {MASTER: master.detach()}

    @torch.no_grad()
    def load(self, given: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
        """Takes back copies of master weights by parameter name; a parameter without one gives its own value."""
        for name, parameter in parameters.items():
            master = self._master.get(id(parameter))
            if master is None:
                continue
            if master.shape != parameter.shape:
                master.data = torch.empty_like(parameter, dtype=torch.float32)
            master.copy_(parameter if given[name] is None else given[name])
        self.round()

    def release(self) -> None:
        """Drops the masters; `load` brings them back."""
        for _, master in self.pairs:
            master.data = master.data.new_empty(0)
