"""What becomes of activations between the forward and the backward pass: kept, computed again, or moved to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlkit.engines.attention import current_layout, packed_forward
from rlkit.engines.forward import bare_model, device_of
from rlkit.errors import ModelError

__all__ = ["Activations", "activations"]

Activations = Literal["keep", "recompute", "offload"]


@contextlib.contextmanager
def activations(model: nn.Module, mode: Activations) -> Iterator[None]:
    """Forwards within it treat activations in the given way, where they are part of a gradient.

    Args:
        model: a causal language model.
        mode: "keep" them in place; "recompute" the inside of each decoder layer in the backward pass (Chen et al. 2016,
            arXiv:1604.06174), which keeps one state a token and layer and costs another forward; "offload" them all
            to host memory.

    Raises:
        ModelError: "recompute" for a model that does not say what its layers are.
    """
    if mode == "keep" or not torch.is_grad_enabled():
        yield
    elif mode == "offload":
        with torch.autograd.graph.save_on_cpu(pin_memory=device_of(model).type == "cuda"):
            yield
    else:
        layers = _layers(model)
        before = [layer.__dict__.get("forward") for layer in layers]
        for layer in layers:
            layer.forward = _recomputed(model, layer)
        try:
            yield
        finally:
            for layer, own in zip(layers, before, strict=True):
                if own is None:
                    del layer.__dict__["forward"]
                else:
                    layer.forward = own


def _layers(model: nn.Module) -> list[nn.Module]:
    names = set(getattr(bare_model(model), "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"activations='recompute' needs a model that names its layers (transformers' _no_split_modules); "
            f"{type(bare_model(model)).__name__} does not. Use 'keep' or 'offload'"
        )
    return layers


def _recomputed(model: nn.Module, layer: nn.Module) -> Callable[..., Any]:
    """The layer's forward under a checkpoint; a packed layout is in force again when it runs for the second time."""
    forward = layer.forward

    def run(*arguments: Any, **options: Any) -> Any:
        layout = current_layout()

        def again(*given: Any, **named: Any) -> Any:
            with contextlib.nullcontext() if layout is None else packed_forward(model, layout, layer):
                return forward(*given, **named)

        return checkpoint(again, *arguments, use_reentrant=False, **options)

    return run
