"""The one file that reads and sets environment variables."""

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

__all__ = [
    "cache_dir",
    "for_child",
    "hub_endpoint",
    "hub_is_off",
    "kernels_are_interpreted",
    "let_threads_sleep",
    "let_vllm_run_in_process",
    "variables",
]

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


def kernels_are_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU (`TRITON_INTERPRET=1`, which it reads when it is loaded)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE


def variables(prefix: str) -> dict[str, str]:
    """The variables whose names begin with `prefix` (such as "NCCL_"), in order of name."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefix)}


def for_child(import_from: Path) -> dict[str, str]:
    """This process's variables for one that it starts, in which `import_from` is searched for modules first."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(import_from), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def let_threads_sleep() -> None:
    """Makes OpenMP's threads sleep while they wait, unless the user chose otherwise or torch is loaded already.

    By default they spin. Beside a notebook server and a browser on a few cores that starves the very thread they wait
    for: on two busy cores, decoding eight tokens took 10 to 37 s with spinning threads and 1.9 s with sleeping ones.
    Inherited by the processes that this one starts.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def let_vllm_run_in_process() -> None:
    """Tells vLLM, before it is imported, to run its engine in this process; a variable that is set keeps its value.

    The engine then shares the trainer's memory and device. Its threads are not bound to cores, which the trainer needs
    too; the FlashInfer sampler is off, since it cannot give log-probs of the distribution that it samples from; and it
    does not warn at every sync of what rlkit asks it to do: to go without a tokenizer, to seed, to share a process.
    """
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def hub_address() -> tuple[str, int]:
    """Host and port that a connection to the hub opens: the hub's own, or those of the proxy set for its scheme."""
    hub = urlsplit(hub_endpoint())
    proxies = getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    target = urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else hub
    return target.hostname or "", target.port or (80 if target.scheme == "http" else 443)
