"""Linear layers that read the same rows, as one product over weights that lie side by side in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = ["Joined"]


class Joined:
    """Several linear layers in one product, without a second copy of their weights.

    The layers' parameters become views into one tensor and stay the parameters that they were: an optimizer, a state
    dict and updates in place see no difference, and updates are seen here. Layers of any other kind (adapters,
    quantised ones), of different dtypes or devices, that share parameters, or of which only some have a bias are called
    one by one; so are those whose weights somebody has moved since.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        linears = [layer for layer in self.layers if isinstance(layer, nn.Linear) and _is_plain(layer)]
        weights = [layer.weight for layer in linears]
        biases = [layer.bias for layer in linears if layer.bias is not None]
        alike = len({(weight.dtype, weight.device) for weight in weights}) == 1
        distinct = len({id(parameter) for parameter in [*weights, *biases]}) == len(weights) + len(biases)
        if len(linears) < len(self.layers) or not (alike and distinct) or len(biases) not in (0, len(linears)):
            return
        self.heights = [len(weight) for weight in weights]
        self.weight = _side_by_side(weights)
        self.bias = _side_by_side(biases) if biases else None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, in) to (B, out) of each layer; the outputs may be views of one tensor."""
        if self.weight is None or not self._lie_in(self.weight):
            return tuple(layer(x) for layer in self.layers)
        return torch.split_with_sizes(linear(x, self.weight, self.bias), self.heights, dim=-1)

    def _lie_in(self, whole: Tensor) -> bool:
        """Whether the weights still are where they were put; a layer that shares one with another group moves it."""
        weights = [cast(Tensor, layer.weight) for layer in self.layers]
        return weights[0].data_ptr() == whole.data_ptr() and _lie_so(weights)


def _is_plain(layer: nn.Linear) -> bool:
    return type(layer) is nn.Linear and type(layer.weight.data) is Tensor and "forward" not in layer.__dict__


@torch.no_grad()
def _side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of which the parameters are consecutive rows; they are moved into one unless they lie so already."""
    first = parameters[0].data
    rows = sum(len(parameter) for parameter in parameters)
    whole = first.as_strided((rows, *first.shape[1:]), first.stride()) if _lie_so(parameters) else None
    if whole is None:
        whole = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, torch.split(whole, [len(p) for p in parameters]), strict=True):
            parameter.data = part
    return whole


def _lie_so(parameters: Sequence[Tensor]) -> bool:
    """Whether each parameter begins where the one before it ends, in the same memory."""
    end = None
    for parameter in parameters:
        if not parameter.is_contiguous() or end not in (None, parameter.data_ptr()):
            return False
        end = parameter.data_ptr() + parameter.numel() * parameter.element_size()
    return len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
