"""Part of `rlkit doctor`: the Python packages rlkit asks for, by extra, against what is installed."""

import platform
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from rlkit import __version__
from rlkit.cli.finding import Finding
from rlkit.utils import installed_version

DISTRIBUTION = "rlkit-lab"
# What an extra is for, when it is missing. `dev` is for work on rlkit itself and not reported.
_PURPOSES = {
    "notebook": "notebooks, widgets and plots",
    "lora": "LoRA adapters",
    "gpu": "vLLM generation, several GPUs or machines",
    "flash-attn": "FlashAttention; without it attention runs through PyTorch's own",
}
_SHOWN = ("torch", "transformers", "tensordict", "jupyterlab", "ipykernel", "peft", "vllm", "ray", "flash-attn")


def findings() -> list[Finding]:
    """Python and rlkit, then one line for the core and one for each extra."""
    found = [
        Finding("Python", platform.python_version()),
        Finding("rlkit", f"{__version__} in {Path(__file__).parents[1]}"),
    ]
    try:
        wanted = [Requirement(text) for text in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:
        return [*found, Finding("core", "not installed as a package", "broken", "pip install -e . in the checkout")]
    found.append(_group("core", [r for r in wanted if r.marker is None], needed=True))
    for extra in _PURPOSES:
        members = [r for r in wanted if r.marker is not None and r.marker.evaluate({"extra": extra})]
        found.append(_group(extra, members, needed=False))
    return found


def _group(name: str, wanted: list[Requirement], *, needed: bool) -> Finding:
    """Whether all packages of a group are there in a version that fits."""
    missing = [r.name for r in wanted if installed_version(r.name) is None]
    unfit = [f"{r.name} {installed_version(r.name)} (needs {r.specifier})" for r in wanted if not fits(r)]
    isolated = " --no-build-isolation" if name == "flash-attn" else ""  # it is compiled against the torch that is there
    install = f"pip install{isolated} '{DISTRIBUTION}{'' if needed else f'[{name}]'}'"
    if len(missing) == len(wanted) and not needed:
        return Finding(name, f"not installed: {_PURPOSES[name]}", "note", install)
    if missing or unfit:
        parts = ([f"missing {', '.join(missing)}"] if missing else []) + unfit
        return Finding(name, "; ".join(parts), "broken" if needed else "warning", install)
    shown = [f"{r.name} {installed_version(r.name)}" for r in wanted if r.name in _SHOWN]
    return Finding(name, ", ".join([*shown, f"all {len(wanted)} packages"] if shown else [f"{len(wanted)} packages"]))


def fits(requirement: Requirement) -> bool:
    """Whether the installed version is in the asked range; True when it is not installed at all."""
    found = installed_version(requirement.name)
    return found is None or requirement.specifier.contains(Version(found), prereleases=True)
