"""Sampling by the length of the prompt: short prompts in one way, long ones in another, on any engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit.generation.base import Generated, Generator, OnFinished, SamplingParams

__all__ = ["AdaptiveSampling"]


@dataclass(frozen=True)
class AdaptiveSampling:
    """How prompts are sampled from that are short or long; those between take the settings of the call.

        rule = AdaptiveSampling(short=SamplingParams(32, temperature=0.0), long=SamplingParams(32, 0.7, top_k=50))
        rule.generate(generator, input_ids, attention_mask, SamplingParams(32), rng)

    Rows that are sampled alike are one call of the generator, so an engine that knows one setting a call will do. Each
    of the three kinds has random numbers of its own, so what a row is given does not depend on the rows of other kinds.
    """

    short: SamplingParams
    """Of prompts under `short_prompt` tokens."""
    long: SamplingParams
    """Of prompts over `long_prompt` tokens."""
    short_prompt: int = 64
    """Tokens; 0 takes no prompt for short."""
    long_prompt: int = 512
    """Tokens."""

    def kinds(self, attention_mask: Tensor) -> Tensor:
        """(B,) int64 for prompts with mask (B, P): 0 short, 1 between, 2 long."""
        lengths = attention_mask.sum(1)
        return 1 - (lengths < self.short_prompt).long() + (lengths > self.long_prompt).long()

    def settings(self, attention_mask: Tensor, params: SamplingParams) -> list[SamplingParams]:
        """(B,) the settings of each row, `params` for those between."""
        kinds = (self.short, params, self.long)
        return [kinds[kind] for kind in self.kinds(attention_mask).tolist()]

    def generate(
        self,
        generator: Generator,
        input_ids: Tensor,
        attention_mask: Tensor,
        params: SamplingParams,
        rng: torch.Generator,
        on_finished: OnFinished | None = None,
        pad_token_id: int = 0,
    ) -> Generated:
        """Samples one response a row; args as for `Generator.generate`.

        Args:
            pad_token_id: written right of a response; its value is never read.
        """
        seeds = torch.randint(2**62, (3,), generator=rng, device=rng.device).tolist()
        kinds = self.kinds(attention_mask)
        parts = []
        for kind, (settings, seed) in enumerate(zip((self.short, params, self.long), seeds, strict=True)):
            rows = (kinds == kind).nonzero().squeeze(1)
            if not len(rows):
                continue
            report = None if on_finished is None else _under_own_numbers(rows.tolist(), on_finished)
            own = torch.Generator(device=rng.device).manual_seed(seed)
            parts.append((rows, generator.generate(input_ids[rows], attention_mask[rows], settings, own, report)))
        return _together(input_ids, parts, pad_token_id)


def _under_own_numbers(numbers: Sequence[int], on_finished: OnFinished) -> OnFinished:
    """Reports rows of a part by what they are called in the whole batch."""

    def report(rows: list[int], finished: Generated) -> None:
        on_finished([numbers[row] for row in rows], finished)

    return report


def _together(input_ids: Tensor, parts: Sequence[tuple[Tensor, Generated]], pad_token_id: int) -> Generated:
    """The rows of all parts in the order of the batch."""
    if len(parts) == 1:
        return parts[0][1]
    width, prompt_width = max(part.response_mask.shape[1] for _, part in parts), input_ids.shape[1]
    shape = (len(input_ids), width)
    ids = torch.cat([input_ids, input_ids.new_full(shape, pad_token_id)], dim=1)
    mask = torch.zeros(shape, dtype=torch.bool, device=input_ids.device)
    logprobs = torch.zeros(shape, dtype=torch.float32, device=input_ids.device)
    reasons = [""] * len(input_ids)
    for rows, part in parts:
        used = part.response_mask.shape[1]
        ids[rows, : prompt_width + used] = part.generated_ids
        mask[rows, :used] = part.response_mask
        logprobs[rows, :used] = part.rollout_logprobs
        for row, reason in zip(rows.tolist(), part.finish_reasons, strict=True):
            reasons[row] = reason
    return Generated(ids, mask, logprobs, reasons)
