"""Questions about this installation that a user's script may ask."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution ("flash-attn"), or None when it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def is_flash_attn_available() -> bool:
    """True when FlashAttention 2 can be used here: flash-attn >= 2.5 is installed, imports, and a CUDA GPU is present.

    rlkit works without it: on a GPU PyTorch's own variable-length attention is used instead.
    """
    found = installed_version("flash-attn")
    if found is None or find_spec("flash_attn") is None or _release(found) < (2, 5):
        return False
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        import flash_attn  # noqa: F401  (a build against another torch fails only here)
    except ImportError:
        return False
    return True


def _release(text: str) -> tuple[int, ...]:
    """(2, 8, 3) for "2.8.3.post1"; stops at the first part that is no number."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
