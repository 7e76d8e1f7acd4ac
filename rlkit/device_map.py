"""Where a controller lives: on which devices, and how its model is laid out on them.

Torch is imported only to look at what this machine has.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rlkit.errors import PlacementError

__all__ = ["DeviceMap", "Strategy", "parse_devices"]

Strategy = Literal["single", "ddp", "fsdp", "tp"]
"""`single`: one device. `ddp`: a full copy on each. `fsdp`: parameters sharded over all. `tp`: each layer split."""

_STRATEGIES: tuple[str, ...] = get_args(Strategy)
_DEVICE = re.compile(r"(?:(?P<kind>[a-z]+):)?(?P<first>\d+)(?:-(?P<last>\d+))?")
_INDEXED_KINDS = ("cuda",)
_PLAIN_KINDS = ("cpu", "mps")
_HOW_TO_WRITE = "write 'cpu', 'cuda:0', 'cuda:0-3', 'cuda:0,2' or a list such as ['cuda:0', 'cuda:1']"


def parse_devices(devices: str | Sequence[str]) -> tuple[str, ...]:
    """Device names written in full, in the order given.

    Args:
        devices: `"cpu"`, `"cuda"` (the first GPU), `"cuda:0-3"`, `"cuda:0,2,5-6"`, or a sequence of such names.

    Returns:
        One name a device: `"cuda:0-1"` gives `("cuda:0", "cuda:1")`.

    Raises:
        PlacementError: a name cannot be read, a range runs backwards, or a device is named twice.
    """
    names: list[str] = []
    for part in [devices] if isinstance(devices, str) else devices:
        if not isinstance(part, str):
            raise PlacementError(f"devices={devices!r}: {part!r} is not a device name; {_HOW_TO_WRITE}")
        names += _parse_list(part)
    if not names:
        raise PlacementError(f"devices={devices!r} names no device; {_HOW_TO_WRITE}")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise PlacementError(f"devices={devices!r} names {', '.join(repeated)} more than once; name each device once")
    return tuple(names)


def _parse_list(text: str) -> list[str]:
    """The devices of one comma-separated string; a kind carries over to the numbers after it ("cuda:0,2")."""
    names: list[str] = []
    kind: str | None = None
    for part in (piece.strip() for piece in text.split(",")):
        if part in _PLAIN_KINDS:
            names.append(part)
            continue
        match = _DEVICE.fullmatch("cuda:0" if part == "cuda" else part)
        kind = (match["kind"] or kind) if match else None
        if match is None or kind not in _INDEXED_KINDS:
            raise PlacementError(f"device {part!r} (in {text!r}) cannot be read; {_HOW_TO_WRITE}")
        first = int(match["first"])
        last = int(match["last"] or first)
        if last < first:
            raise PlacementError(f"device range {part!r} runs backwards; write {kind}:{last}-{first}")
        names += [f"{kind}:{index}" for index in range(first, last + 1)]
    return names


@dataclass(frozen=True, init=False)
class DeviceMap:
    """The devices of one controller and how its model is spread over them.

    A map is only a plan: writing down GPUs that this machine lacks is legal, `require_available` looks.
    """

    strategy: Strategy
    """How the model is laid out on `devices`."""
    devices: tuple[str, ...]
    """Device names in full, the primary one first."""
    tp_size: int | None
    """Devices that share one layer (strategy `tp` only); the rest of the devices hold further copies."""
    sharding_dim: str | None
    """What `fsdp` shards: `"model"`, its parameters; None means the same."""

    def __init__(
        self,
        strategy: Strategy = "single",
        devices: str | Sequence[str] | None = None,
        tp_size: int | None = None,
        sharding_dim: str | None = None,
    ) -> None:
        """Read and check a plan.

        Args:
            strategy: one of `single`, `ddp`, `fsdp`, `tp`.
            devices: as `parse_devices` takes them; None is the first GPU, or the CPU where there is none.
            tp_size: only with `tp`: a divisor of the number of devices; None takes them all.
            sharding_dim: only with `fsdp`: `"model"`.

        Raises:
            PlacementError: a value cannot be read or does not fit the strategy.
        """
        if strategy not in _STRATEGIES:
            raise PlacementError(f"strategy={strategy!r} is unknown; choose one of {', '.join(_STRATEGIES)}")
        names = _default_devices() if devices is None else parse_devices(devices)
        if strategy == "single" and len(names) > 1:
            raise PlacementError(
                f"strategy='single' takes one device, {len(names)} were given ({', '.join(names)}); "
                "name one device, or choose 'ddp', 'fsdp' or 'tp'"
            )
        if tp_size is not None and strategy != "tp":
            raise PlacementError(f"tp_size={tp_size} was given with strategy={strategy!r}; it belongs to 'tp', drop it")
        if strategy == "tp":
            tp_size = len(names) if tp_size is None else tp_size
            if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1 or len(names) % tp_size:
                raise PlacementError(
                    f"tp_size={tp_size!r} does not divide the {len(names)} devices ({', '.join(names)}); "
                    "give a divisor, or leave it out to use them all"
                )
        if sharding_dim is not None and (strategy != "fsdp" or sharding_dim != "model"):
            raise PlacementError(
                f"sharding_dim={sharding_dim!r} with strategy={strategy!r} means nothing; "
                "it is 'model' with strategy='fsdp', leave it out otherwise"
            )
        for name, value in (
            ("strategy", strategy),
            ("devices", names),
            ("tp_size", tp_size),
            ("sharding_dim", sharding_dim),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def default(cls) -> "DeviceMap":
        """The first GPU where there is one, the CPU otherwise."""
        return cls("single")

    @classmethod
    def from_spec(cls, spec: "DeviceMap | str | Sequence[str] | Mapping[str, Any]") -> "DeviceMap":
        """The map that a configuration value means.

        Args:
            spec: a map as it is; device names (one: `single`, several: `fsdp`); or `{"model": device names}`.

        Raises:
            PlacementError: another key than `model`, or devices that cannot be read.
        """
        if isinstance(spec, DeviceMap):
            return spec
        if isinstance(spec, Mapping):
            if set(spec) != {"model"}:
                raise PlacementError(f"device mapping {dict(spec)!r} must have the one key 'model'")
            return cls.from_spec(spec["model"])
        names = parse_devices(spec)
        return cls("single" if len(names) == 1 else "fsdp", names)

    @property
    def primary(self) -> str:
        """The first device, e.g. `"cuda:0"`."""
        return self.devices[0]

    def require_single(self) -> str:
        """The one device of this map.

        Raises:
            PlacementError: the map names several devices, which this version cannot run on.
        """
        if len(self.devices) > 1:
            raise PlacementError(
                f"{self} names {len(self.devices)} devices; this version runs on one device: "
                f"use DeviceMap('single', devices='{self.primary}')"
            )
        return self.primary

    def require_available(self) -> None:
        """Check that this machine has every device of the map.

        Raises:
            PlacementError: naming the missing devices and what is there.
        """
        present = _visible_devices()
        missing = [name for name in self.devices if name not in present]
        if missing:
            raise PlacementError(
                f"{self} names {', '.join(missing)}, but this machine has only {', '.join(present)}; "
                "name one of these, or check the driver and CUDA_VISIBLE_DEVICES"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values for a config file; `DeviceMap(**values)` reads them back."""
        return {
            "strategy": self.strategy,
            "devices": list(self.devices),
            "tp_size": self.tp_size,
            "sharding_dim": self.sharding_dim,
        }

    def __str__(self) -> str:
        return f"DeviceMap({self.strategy!r}, devices={','.join(self.devices)!r})"


def _default_devices() -> tuple[str, ...]:
    import torch

    return ("cuda:0",) if torch.cuda.is_available() else ("cpu",)


def _visible_devices() -> tuple[str, ...]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = ["cpu", *(f"cuda:{index}" for index in range(count))]
    if torch.backends.mps.is_available():
        found.append("mps")
    return tuple(found)
