"""One forward over each distinct prompt, continued by every response to it: what a group of rollouts has in common."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines.forward import bare_model, forward_arguments, position_ids_from_mask

__all__ = ["cache_argument", "continue_prompts", "distinct_prompts"]

_CACHE_ARGUMENTS = ("cache", "past_key_values")  # the newer and the older name in transformers


def cache_argument(model: nn.Module) -> str | None:
    """Name under which the forward takes a key-value cache; None for a module that takes none."""
    if not hasattr(model, "config"):
        return None
    names, _ = forward_arguments(model)
    return next((name for name in _CACHE_ARGUMENTS if name in names), None)


def distinct_prompts(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows hold the same prompt.

    Args:
        input_ids: (B, P) int64, padded on the left.
        attention_mask: (B, P) bool.

    Returns:
        first (U,): the first row of each of the U distinct prompts; row_of (B,): which of them each row holds.
    """
    rows = torch.cat([input_ids * attention_mask, attention_mask.long()], dim=1)
    _, row_of = torch.unique(rows, dim=0, return_inverse=True)
    first = row_of.new_full((int(row_of.max()) + 1,), len(rows))
    return first.scatter_reduce(0, row_of, torch.arange(len(rows), device=rows.device), "amin"), row_of


def continue_prompts(
    model: nn.Module,
    head: nn.Module,
    batch_ids: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    distinct: tuple[Tensor, Tensor],
    predict: bool,
) -> tuple[Tensor, Tensor]:
    """Logits (N, V) and states (N, H) at the N real response tokens, with one forward over each distinct prompt.

    The same numbers as a forward over whole sequences up to rounding, and the same gradients: those of a prompt's keys
    and values add up over its responses.

    Args:
        model: a `transformers` causal language model that takes a cache.
        head: its output head.
        batch_ids: (B, P + T) int64, T above 1.
        attention_mask: (B, P + T) bool.
        mask: (B, T) bool, real response tokens.
        distinct: from `distinct_prompts`.
        predict: False leaves the logits out: they are of no token.
    """
    from transformers import DynamicCache

    bare: Any = bare_model(model)
    width = batch_ids.shape[1] - mask.shape[1]
    first, row_of = distinct
    cache: Any = DynamicCache(config=bare.config)
    options = {str(cache_argument(bare)): cache, "use_cache": True}
    captured: list[Tensor] = []

    def end_of_prompt(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        captured.append(arguments[0][:, -1])
        return (arguments[0][:, :0], *arguments[1:])

    def keep_response_tokens(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states = torch.cat([captured.pop()[row_of].unsqueeze(1), arguments[0]], dim=1)[mask]
        captured.append(states)
        return (states.unsqueeze(0) if predict else states[None, :0], *arguments[1:])

    with ExitStack() as stack:
        handle = head.register_forward_pre_hook(end_of_prompt)
        stack.callback(handle.remove)
        prompts = attention_mask[first, :width]
        positions = position_ids_from_mask(prompts)
        bare(batch_ids[first, :width], attention_mask=prompts.long(), position_ids=positions, **options)
        handle.remove()
        stack.callback(head.register_forward_pre_hook(keep_response_tokens).remove)
        cache.batch_select_indices(row_of)
        positions = position_ids_from_mask(attention_mask)[:, width:-1]
        # The last token predicts nothing that is scored, so it needs no forward.
        output = bare(
            batch_ids[:, width:-1],
            attention_mask=attention_mask[:, :-1].long(),
            position_ids=positions,
            **options,
        )
    return output.logits[0], captured[0]
