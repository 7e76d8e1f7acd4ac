"""Score sampled responses under a model: one forward, logits for response tokens only."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from rlkit.algorithms.distributions import Sampled, logprobs_and_entropy, token_logprobs
from rlkit.engines.forward import bare_model, call_logits, output_head
from rlkit.engines.shared_prompts import cache_argument, continue_prompts, distinct_prompts
from rlkit.errors import ModelError

__all__ = ["TokenScores", "response_scores", "response_states"]

EntropyMode = Literal["value", "differentiable"] | None

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

    Where prompts repeat, as in groups, each one goes through the model once and its responses continue it.

    Positions come from the mask, so a sequence scores the same however it is padded. The output head runs on real
    response tokens only. The mode of the model (train or eval) is left as it is.

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
    logits, kept = _run_with_head(model, head, batch_ids, full_attention_mask, mask)
    states = _unpack_states(kept, mask) if hidden else None
    return _from_logits(logits, batch_ids[:, prompt_width:][mask], mask, temperature, entropy, states)


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
    _, kept = _run_with_head(model, head, batch_ids, full_attention_mask, mask, predict=False)
    return _unpack_states(kept, mask)


def _run_with_head(
    model: nn.Module,
    head: nn.Module,
    batch_ids: Tensor,
    full_attention_mask: Tensor,
    mask: Tensor,
    predict: bool = True,
) -> tuple[Tensor, Tensor]:
    """Logits (N, V) and states (N, H) at the N real response tokens; without `predict` the logits are of none."""
    captured: list[Tensor] = []
    prompt_width = batch_ids.shape[1] - mask.shape[1]
    if mask.shape[1] > 1 and cache_argument(bare_model(model)) is not None:
        distinct = distinct_prompts(batch_ids[:, :prompt_width], full_attention_mask[:, :prompt_width])
        if 2 * len(distinct[0]) <= len(mask):
            return continue_prompts(model, head, batch_ids, full_attention_mask, mask, distinct, predict)

    def keep_response_tokens(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states: Tensor = arguments[0]
        captured.append(states[:, prompt_width - 1 :][mask])
        return (captured[0].unsqueeze(0) if predict else captured[0][None, :0], *arguments[1:])

    with ExitStack() as stack:
        stack.callback(head.register_forward_pre_hook(keep_response_tokens).remove)
        # The last token predicts nothing that is scored, so it needs no forward.
        logits = call_logits(model, batch_ids[:, :-1], full_attention_mask[:, :-1], use_cache=False)[0]
    return logits, captured[0]


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
    width = mask.shape[1]
    return _from_logits(logits[:, -width:][mask], batch_ids[:, -width:][mask], mask, temperature, entropy, None)


def _from_logits(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor,
    temperature: float | Sampled,
    entropy: EntropyMode,
    hidden: Tensor | None,
) -> TokenScores:
    """From logits (N, V) and tokens (N,) of the N real response tokens."""
    sampled = Sampled.of(temperature).rows(mask)
    if entropy is None:
        return TokenScores(_unpack(token_logprobs(logits, tokens, sampled), mask), None, hidden)
    logprobs, spread = logprobs_and_entropy(logits, tokens, sampled)
    if entropy == "value":
        spread = spread.detach()
    return TokenScores(_unpack(logprobs, mask), _unpack(spread, mask), hidden)


def _unpack(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) values of the true positions -> (B, T) with zeros elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
