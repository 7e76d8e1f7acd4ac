"""What controllers with a model share: their modules follow the device map, and give up and take back their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlkit.controllers.base import Controller
from rlkit.device_map import DeviceMap
from rlkit.engines.budget import TokenBudget
from rlkit.engines.masters import round_parameters
from rlkit.engines.recompute import Activations


class HostedController(Controller):
    """A controller that keeps torch modules on its device."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.scoring = TokenBudget()
        """How much is scored at once without gradients; a trainer sets it."""
        self.activations: Activations = "keep"
        """What becomes of activations where gradients are asked for; a trainer sets it."""

    def modules(self) -> dict[str, nn.Module]:
        """The modules that this controller keeps; a module that it merely uses is another controller's."""
        return {}

    @property
    def device(self) -> str:
        """Where the modules are now, also before a trainer has placed them."""
        parameters = (p for module in self.modules().values() for p in module.parameters())
        first = next(parameters, None)
        return self.device_map.primary if first is None else str(first.device)

    @property
    def has_own_device_map(self) -> bool:
        """Whether a device map was set on this controller, rather than taken by default."""
        return getattr(self, "_device_map", None) is not None

    def placed(self, device_map: DeviceMap) -> None:
        """Moves the modules to the device that was set.

        Raises:
            PlacementError: the map names several devices, or one that is not there.
        """
        device = device_map.require_single()
        device_map.require_available()
        for module in self.modules().values():
            module.to(device)

    def round(self, dtype: torch.dtype) -> None:
        """Casts the weights of the language model this controller keeps; a value head stays in float32."""
        for name, module in self.modules().items():
            if name == "model":
                round_parameters(module, dtype)

    def frozen_state_dict(self) -> dict[str, Any]:
        """Weights that never change, stored once for a whole run; none by default."""
        return {}

    def load_frozen_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `frozen_state_dict` gave; missing and unknown names raise."""
