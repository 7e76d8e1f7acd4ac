"""The one file that reads environment variables."""

import os
from pathlib import Path

__all__ = ["cache_dir", "for_child", "hub_endpoint", "hub_is_off", "variables"]

_TRUE = {"1", "true", "yes", "on"}


def cache_dir() -> Path:
    """Where rlkit keeps what it fetches for a user: `$XDG_CACHE_HOME/rlkit`, else `~/.cache/rlkit`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rlkit"


def hub_is_off() -> bool:
    """True when the user has told the Hugging Face libraries to stay off the network."""
    return any(os.environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hub_endpoint() -> str:
    """Address of the model hub (`$HF_ENDPOINT` for mirrors)."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def variables(prefix: str) -> dict[str, str]:
    """The variables whose names begin with `prefix` (such as "NCCL_"), in order of name."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefix)}


def for_child(import_from: Path) -> dict[str, str]:
    """This process's variables for one that it starts, in which `import_from` is searched for modules first."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(import_from), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
