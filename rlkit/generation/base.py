"""What a generator takes and returns, whichever engine samples."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rlkit.errors import GenerationError

__all__ = ["Generated", "Generator", "OnFinished", "SamplingParams", "Synced", "require_prompts"]

_COLDEST = 1e-30
"""Lowest temperature above 0: logits divided by less can leave the range of float32, and then nothing is known."""


@dataclass(frozen=True)
class SamplingParams:
    """The distribution to sample from and when to stop."""

    max_new_tokens: int
    """Most tokens a response may have (at least 1)."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token always (a distribution of one token, log-prob 0)."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to at least this (0 < top_p <= 1)."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0 for all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response. The one that was sampled belongs to the response."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))
        for name in ("max_new_tokens", "top_k"):
            if not isinstance(given := getattr(self, name), Integral):
                raise GenerationError(f"{name} is {given!r}; expected a whole number of tokens")
        if self.max_new_tokens < 1:
            raise GenerationError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1")
        if self.temperature != 0 and not _COLDEST <= self.temperature < float("inf"):
            raise GenerationError(
                f"temperature is {self.temperature}; expected 0 (always the most likely token) or a finite number of "
                f"at least {_COLDEST}"
            )
        if not 0 < self.top_p <= 1:
            raise GenerationError(
                f"top_p is {self.top_p}; expected a number above 0 and at most 1 (1 keeps all tokens)"
            )
        if self.top_k < 0:
            raise GenerationError(f"top_k is {self.top_k}; expected 0 (all tokens) or a positive number of tokens")

    @property
    def truncates(self) -> bool:
        """True when some tokens can never be sampled, so that the full softmax is another distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.temperature == 0


@dataclass(frozen=True)
class Generated:
    """Sampled responses. T is the length of the longest response among the rows, at most `max_new_tokens`."""

    generated_ids: Tensor
    """(B, L) int64, L = P + T: the prompt block as it was given, then the response, padded on the right."""
    response_mask: Tensor
    """(B, T) bool, true at every sampled token, the stop token included."""
    rollout_logprobs: Tensor
    """(B, T) float32: log-prob of each sampled token under the distribution it was drawn from (after temperature,
    top-k and top-p, renormalised over the kept tokens); 0 at padding."""
    finish_reasons: list[str]
    """(B,) "stop" when a stop token was sampled, "length" when `max_new_tokens` ended the response."""

    def select(self, rows: Iterable[int]) -> "Generated":
        """The given rows, cut to their longest response."""
        chosen = list(rows)
        index = torch.tensor(chosen, dtype=torch.long, device=self.generated_ids.device)
        mask = self.response_mask[index]
        width = int(mask.sum(-1).max()) if chosen else 0
        prompt_width = self.generated_ids.shape[1] - mask.shape[1]
        return Generated(
            self.generated_ids[index, : prompt_width + width],
            mask[:, :width],
            self.rollout_logprobs[index, :width],
            [self.finish_reasons[row] for row in chosen],
        )


OnFinished = Callable[[list[int], Generated], None]
"""Called with the indices of rows that have just finished, and these rows, in the order of the indices."""


@dataclass(frozen=True)
class Synced:
    """What it took to give a generator the trainer's weights."""

    bytes: int = 0
    """Bytes of weights handed over; 0 where the generator reads the trainer's own, or has these already."""
    seconds: float = 0.0
    """Wall-clock time of the hand-over."""

    def __add__(self, other: "Synced") -> "Synced":
        return Synced(self.bytes + other.bytes, self.seconds + other.seconds)


@runtime_checkable
class Generator(Protocol):
    """Anything that samples responses to a batch of prompts.

    `sync` comes before `generate` whenever the weights may have changed. Around training a generator may `sleep`, and
    `sync` wakes it; `release` gives up everything, and the generator starts anew when it is next synced.
    """

    def sync(self, model: nn.Module, version: Hashable) -> Synced:
        """Makes the generator sample from the model's current weights.

        Args:
            model: the module that is trained.
            version: names the weights; nothing moves while the generator has those of the same version.
        """
        ...

    def sleep(self) -> None:
        """Gives up what is not needed while the model is trained; a generator without such memory does nothing."""
        ...

    def spare(self) -> bool:
        """Gives up memory that is kept for speed alone, when memory runs out elsewhere; whether there was any."""
        ...

    def release(self) -> None:
        """Gives up memory and processes kept from call to call."""
        ...

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        params: SamplingParams,
        rng: torch.Generator,
        on_finished: OnFinished | None = None,
    ) -> Generated:
        """Sample one response per row.

        Args:
            input_ids: (B, P) int64, prompts padded on the left.
            attention_mask: (B, P) bool, true at prompt tokens. The last column is true in every row.
            params: distribution and stopping.
            rng: source of all randomness; the same state gives the same responses.
            on_finished: told about rows as soon as they finish; every row is reported exactly once.

        Raises:
            GenerationError: for prompts that cannot be continued (empty, padded on the right, longer than the
                model's context allows).
        """
        ...


def require_prompts(
    input_ids: Tensor, attention_mask: Tensor, params: SamplingParams, context: int | None, what: str = "model"
) -> None:
    """Refuses prompts that cannot be continued.

    Args:
        input_ids: (B, P) int64.
        attention_mask: (B, P) bool.
        params: how long a response may be.
        context: most tokens of prompt and response together; None for no limit.
        what: whose limit that is.

    Raises:
        GenerationError: shapes differ, a row is empty or padded on the right, or the longest does not fit.
    """
    if input_ids.dim() != 2 or input_ids.shape != attention_mask.shape or not input_ids.numel():
        raise GenerationError(
            f"input_ids has shape {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)}; "
            "expected one shape (rows, prompt width) with at least one row and one column"
        )
    bad = (~attention_mask[:, -1] | (attention_mask.long().diff(dim=-1) < 0).any(-1)).nonzero().flatten().tolist()
    if bad:
        raise GenerationError(
            f"rows {bad[:8]} are empty or not padded on the left; expected every prompt to end in the last column, "
            "with padding only before its first token"
        )
    longest = int(attention_mask.sum(-1).max())
    if context is not None and longest + params.max_new_tokens > context:
        raise GenerationError(
            f"the longest prompt has {longest} tokens and max_new_tokens is {params.max_new_tokens}, together more "
            f"than the {what}'s context of {context}; shorten the prompts or lower max_new_tokens"
        )
