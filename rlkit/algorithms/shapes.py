"""Rank and shape assertions with messages that name the tensor."""

from torch import Tensor

from rlkit.errors import DataError

__all__ = ["require_rank", "require_same_shape"]


def require_rank(rank: int, **tensors: Tensor) -> None:
    """Raises DataError unless every tensor has `rank` dimensions."""
    for name, tensor in tensors.items():
        if tensor.ndim != rank:
            raise DataError(f"{name} must have {rank} dimension(s), given shape {tuple(tensor.shape)}")


def require_same_shape(**tensors: Tensor) -> None:
    """Raises DataError unless all tensors have the shape of the first."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            raise DataError(
                f"{name} must have the shape of {first_name} {tuple(first.shape)}, given {tuple(tensor.shape)}"
            )
