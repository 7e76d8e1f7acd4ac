"""Score sampled responses under a model: one forward without padding, logits for response tokens only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlkit.algorithms.distributions import Sampled, logprobs_and_entropy, token_logprobs
from rlkit.engines.attention import packed_forward, packs
from rlkit.engines.forward import bare_model, call_logits, logits_of, output_head
from rlkit.engines.heads import pool_last
from rlkit.engines.packing import pack, pack_sequences
from rlkit.errors import ModelError

__all__ = ["EntropyMode", "TokenScores", "last_logits", "response_scores", "response_states"]

EntropyMode = Literal["value", "differentiable"] | None

_LOGITS = {"cpu": 2**27}
_LOGITS_ELSEWHERE = 2**28
"""Most logits that exist at a time, by kind of device."""
_head_is_last: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a model's logits are what its output head gives, with no soft cap or scale after it."""
_NO_HEAD = (
    "{} does not say which module is its output head, so its hidden states cannot be read; give it a method "
    "get_output_embeddings() that returns that module"
)


@dataclass(frozen=True)
class TokenScores:
    """What a model says about each response token. Differentiable unless computed under `torch.no_grad()`."""

    logprobs: Tensor
    """(B, T) float32: log-prob of each response token under what it was sampled from; 0 at padding."""
    entropy: Tensor | None
    """(B, T) float32, nats: entropy of the distribution each response token was drawn from; 0 at padding."""
    hidden: Tensor | None
    """(B, T, H) in the model's dtype: the state from which each response token is predicted, that is the last hidden
    state *before* token t (input to the output head); 0 at padding."""


def response_scores(
    model: nn.Module,
    batch_ids: Tensor,
    full_attention_mask: Tensor,
    prompt_width: int,
    temperature: float | Sampled = 1.0,
    entropy: EntropyMode = None,
    hidden: bool = False,
) -> TokenScores:
    """Log-probs (and entropies, and hidden states) of the response tokens, from one forward.

    Sequences are laid end to end without padding where the model allows it (`rlkit.engines.attention.packs`), and
    prompts that repeat, as in groups, go through the model once; other models run padded. Positions come from the mask,
    so a sequence scores the same however it is padded. The output head runs on real response tokens only, some of them
    at a time. The mode of the model (train or eval) is left as it is.

    Args:
        model: a causal language model, see `rlkit.engines.forward`.
        batch_ids: (B, L) int64, prompt block then response.
        full_attention_mask: (B, L) bool, true at prompt and response tokens.
        prompt_width: P, width of the prompt block; responses start at this column.
        temperature: what the responses were sampled from, its values (B,) where they are one a row; a number is a
            temperature above 0 at which no token was cut off.
        entropy: also return entropies, as numbers ("value") or with a gradient ("differentiable").
        hidden: also return the states before each token.

    Raises:
        ModelError: when hidden states are asked for and the model does not name its output head.
    """
    mask = full_attention_mask[:, prompt_width:].bool()
    head = output_head(model)
    if head is None:
        return _scores_without_head(model, batch_ids, full_attention_mask, mask, temperature, entropy, hidden)
    tokens, sampled = batch_ids[:, prompt_width:][mask], Sampled.of(temperature).alike().rows(mask)
    bare = bare_model(model)
    if _head_is_last.get(bare, True):
        kept = _states(model, head, batch_ids, full_attention_mask, mask)
    if _head_is_last.get(bare, True):
        logprobs, spread = _by_chunks(head, kept, tokens, sampled, entropy)
    else:
        logits, kept = _through_head(model, head, batch_ids, full_attention_mask, mask)
        logprobs, spread = _of_logits(logits, tokens, sampled, entropy)
    return _scores(logprobs, spread, mask, _unpack_states(kept, mask) if hidden else None)


def response_states(model: nn.Module, batch_ids: Tensor, full_attention_mask: Tensor, prompt_width: int) -> Tensor:
    """(B, T, H): the last hidden state before each response token; 0 at padding. No logits are computed.

    Args as for `response_scores`.

    Raises:
        ModelError: when the model does not name its output head.
    """
    mask = full_attention_mask[:, prompt_width:].bool()
    head = output_head(model)
    if head is None:
        raise ModelError(_NO_HEAD.format(type(model).__name__))
    return _unpack_states(_states(model, head, batch_ids, full_attention_mask, mask), mask)


def last_logits(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """(B, V) logits at the last attended token of each row; those of other tokens are not computed.

    Args:
        model: a causal language model, see `rlkit.engines.forward`.
        ids: (B, L) int64.
        mask: (B, L) bool, true at real tokens; every row has at least one.
    """
    head, bare = output_head(model), bare_model(model)
    if head is None:
        return pool_last(call_logits(model, ids, mask, use_cache=False), mask)
    if not packs(model):
        with _before_head(head, lambda states: pool_last(states, mask), None):
            return call_logits(model, ids, mask, use_cache=False)[0]
    layout = pack_sequences(ids, mask)
    with _before_head(head, lambda states: states[0, layout.predicts], None), packed_forward(model, layout):
        return logits_of(bare(layout.ids[None], position_ids=layout.positions[None], use_cache=False), bare)[0]


def _states(model: nn.Module, head: nn.Module, batch_ids: Tensor, full_attention_mask: Tensor, mask: Tensor) -> Tensor:
    """(R, H): the state that predicts each of the R real response tokens, row by row.

    The head has nothing to do, but for one state of a model that is new: it tells whether anything follows the head.
    """
    bare, width = bare_model(model), batch_ids.shape[1] - mask.shape[1]
    tried = bare in _head_is_last or not bool(mask.any())
    rows = 0 if tried else 1
    if packs(model):
        layout = pack(batch_ids, full_attention_mask, width)
        with _before_head(head, lambda states: states[0, layout.predicts], rows) as kept:
            with packed_forward(model, layout):
                output = bare(layout.ids[None], position_ids=layout.positions[None], use_cache=False)
            logits = logits_of(output, bare)
    else:
        with _before_head(head, lambda states: states[:, width - 1 :][mask], rows) as kept:
            # The last token predicts nothing that is scored, so it needs no forward.
            logits = call_logits(model, batch_ids[:, :-1], full_attention_mask[:, :-1], use_cache=False)
    if not tried:
        with torch.no_grad():
            _head_is_last[bare] = torch.equal(head(kept[0][:1].unsqueeze(0)), logits)
    return kept[0]


def _through_head(
    model: nn.Module, head: nn.Module, batch_ids: Tensor, full_attention_mask: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The model's own logits (R, V) at the R real response tokens, and the states (R, H) that predict them."""
    width = batch_ids.shape[1] - mask.shape[1]
    with _before_head(head, lambda states: states[:, width - 1 :][mask], None) as kept:
        logits = call_logits(model, batch_ids[:, :-1], full_attention_mask[:, :-1], use_cache=False)
    return logits[0], kept[0]


@contextmanager
def _before_head(head: nn.Module, choose: Callable[[Tensor], Tensor], rows: int | None) -> Iterator[list[Tensor]]:
    """Collects the states (R, H) chosen from those that reach the head, which is run on the first `rows` or on all."""
    kept: list[Tensor] = []

    def hook(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        kept.append(choose(arguments[0]))
        return (kept[0][:rows].unsqueeze(0), *arguments[1:])

    handle = head.register_forward_pre_hook(hook)
    try:
        yield kept
    finally:
        handle.remove()


def _by_chunks(
    head: nn.Module, states: Tensor, tokens: Tensor, sampled: Sampled, entropy: EntropyMode
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies (R,) with the logits of a chunk of rows at a time.

    Where there are several chunks, their logits are computed again for the gradient rather than kept.
    """
    width = getattr(head, "out_features", None) or head(states[:1]).shape[-1]
    rows = max(1, _LOGITS.get(states.device.type, _LOGITS_ELSEWHERE) // width)
    if len(states) <= rows:
        return _of_logits(head(states), tokens, sampled, entropy)

    def chunk(some: Tensor, ids: Tensor, own: Sampled) -> tuple[Tensor, Tensor | None]:
        return _of_logits(head(some), ids, own, entropy)

    parts = []
    for start in range(0, len(states), rows):
        span = slice(start, start + rows)
        given = (states[span], tokens[span], sampled.rows(span))
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk, *given, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(chunk(*given))
    logprobs, spreads = zip(*parts, strict=True)
    return torch.cat(logprobs), None if entropy is None else torch.cat(spreads)


def _unpack_states(kept: Tensor, mask: Tensor) -> Tensor:
    """(N, H) states of the true positions -> (B, T, H) with zeros elsewhere."""
    return kept.new_zeros(*mask.shape, kept.shape[-1]).masked_scatter(mask.unsqueeze(-1), kept)


def _scores_without_head(
    model: nn.Module,
    batch_ids: Tensor,
    full_attention_mask: Tensor,
    mask: Tensor,
    temperature: float | Sampled,
    entropy: EntropyMode,
    hidden: bool,
) -> TokenScores:
    if hidden:
        raise ModelError(_NO_HEAD.format(type(model).__name__))
    logits = call_logits(model, batch_ids[:, :-1], full_attention_mask[:, :-1], use_cache=False)
    width, sampled = mask.shape[1], Sampled.of(temperature).alike().rows(mask)
    return _scores(*_of_logits(logits[:, -width:][mask], batch_ids[:, -width:][mask], sampled, entropy), mask, None)


def _of_logits(logits: Tensor, tokens: Tensor, sampled: Sampled, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
    """Log-probs and, if asked for, entropies (R,) from logits (R, V) and tokens (R,)."""
    if entropy is None:
        return token_logprobs(logits, tokens, sampled), None
    logprobs, spread = logprobs_and_entropy(logits, tokens, sampled)
    return logprobs, spread.detach() if entropy == "value" else spread


def _scores(logprobs: Tensor, spread: Tensor | None, mask: Tensor, states: Tensor | None) -> TokenScores:
    return TokenScores(_unpack(logprobs, mask), None if spread is None else _unpack(spread, mask), states)


def _unpack(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) values of the true positions -> (B, T) with zeros elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
