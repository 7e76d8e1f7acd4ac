"""Ways to get the logits of the next token: with the model's key-value cache, or over the whole sequence again."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlkit.engines.forward import bare_model, call_logits, forward_arguments, position_ids_from_mask

__all__ = ["CachedDecoder", "Decoder", "UncachedDecoder"]


class Decoder(Protocol):
    """Holds what the model has seen of a batch of sequences."""

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Take in prompts (B, P); returns (B, V) logits of the first response token."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token (B,) to each row; returns (B, V) logits of the next one."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keep these rows (indices (B',) int64); one may be named several times to continue in several ways."""
        ...


class CachedDecoder:
    """Through the model's own forward with a transformers `DynamicCache`.

    Args:
        model: takes a cache.
        cache_argument: under this name.
        whole: keep every token, of layers that attend within a window as well.
        padded: False where no prompt is, which spares a look at the mask that waits for the device.
    """

    def __init__(self, model: nn.Module, cache_argument: str, whole: bool = False, padded: bool = True) -> None:
        from transformers import DynamicCache

        bare: Any = bare_model(model)
        self.model = bare
        self.cache: Any = DynamicCache() if whole else DynamicCache(config=bare.config)
        self.cache_argument, self.padded = cache_argument, padded
        self.attention_mask = torch.empty(0)
        self.names = forward_arguments(self.model)[0]

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.attention_mask = attention_mask.long()
        return self._forward(input_ids, position_ids_from_mask(attention_mask))

    def step(self, tokens: Tensor) -> Tensor:
        self.attention_mask = torch.cat([self.attention_mask, self.attention_mask.new_ones(len(tokens), 1)], dim=1)
        position_ids = self.attention_mask.sum(-1, keepdim=True) - 1
        return self._forward(tokens.unsqueeze(-1), position_ids)

    def _forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        arguments = {self.cache_argument: self.cache, "use_cache": True}
        if "logits_to_keep" in self.names:
            arguments["logits_to_keep"] = 1
        mask = self.attention_mask if self.padded else None
        output = self.model(input_ids, attention_mask=mask, position_ids=position_ids, **arguments)
        logits: Tensor = output.logits[:, -1]
        return logits

    def select(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.attention_mask = self.attention_mask[rows]


class UncachedDecoder:
    """For modules without a cache: every token costs a forward over the whole sequence."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.input_ids = torch.empty(0)
        self.attention_mask = torch.empty(0)

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.input_ids, self.attention_mask = input_ids, attention_mask
        return self._forward()

    def step(self, tokens: Tensor) -> Tensor:
        self.input_ids = torch.cat([self.input_ids, tokens.unsqueeze(-1)], dim=1)
        self.attention_mask = torch.cat([self.attention_mask, self.attention_mask.new_ones(len(tokens), 1)], dim=1)
        return self._forward()

    def _forward(self) -> Tensor:
        return call_logits(self.model, self.input_ids, self.attention_mask, use_cache=False, logits_to_keep=1)[:, -1]

    def select(self, rows: Tensor) -> None:
        self.input_ids, self.attention_mask = self.input_ids[rows], self.attention_mask[rows]
