"""Rows of a batch begin in slots: a forward over their distinct prompts, and the first token of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rlkit.generation.base import SamplingParams
from rlkit.generation.gpu.graphs import Graphs
from rlkit.generation.gpu.prefill import Prefill
from rlkit.generation.gpu.slots import Buffers, Rows
from rlkit.generation.sampling import goes_on

__all__ = ["Admission", "Prepared"]

_CAPTURED = 4096
"""Most tokens of prompts in a graph, whose activations stay allocated with it."""


@dataclass(frozen=True)
class Prepared:
    """Rows that are about to begin."""

    begin: Callable[[], None]
    """Lets them; the device is not waited for, unless the model's own forward does so."""
    is_quick: bool
    """Whether the host has next to nothing to do for it."""


class Admission:
    """Lets rows of a batch begin.

    It is hundreds of short kernels, which take the host longer to launch than a GPU to run. Where rows wait it comes
    again and again for as many of them; the second time it is captured as a graph.

    Args:
        prefill: the forward over prompts.
        sample: draws tokens from logits.
        device: of both.
        graphs: whether graphs are captured.
    """

    def __init__(
        self,
        prefill: Prefill,
        sample: Callable[[Tensor, SamplingParams, Tensor], tuple[Tensor, Tensor]],
        device: torch.device,
        graphs: bool,
    ) -> None:
        self.prefill, self.sample, self.device = prefill, sample, device
        self._graphs = Graphs(device, "the forward over prompts", graphs and prefill.can_be_captured)
        self._ids = self._mask = self._asked = torch.empty(0)

    def release(self) -> None:
        """Gives up graphs and memory."""
        self._graphs.clear()
        self._ids = self._mask = self._asked = torch.empty(0)

    def start(self, buffers: Buffers, input_ids: Tensor, attention_mask: Tensor) -> None:
        """Takes the prompts (B, P) of a call, which has been started in `buffers`."""
        asked = 4 * buffers.slots
        if self._ids.shape != input_ids.shape or len(self._asked) < asked:
            self._graphs.clear()  # they read where the old ones lie
            self._ids, self._mask = torch.empty_like(input_ids), torch.empty_like(attention_mask)
            self._asked = torch.zeros(asked, dtype=torch.int64, device=self.device)
        self._ids.copy_(input_ids)
        self._mask.copy_(attention_mask)
        self._padded = not bool(attention_mask.all())

    def prepare(self, buffers: Buffers, rows: Rows, slots: Tensor, chosen: Tensor, params: SamplingParams) -> Prepared:
        """For rows `chosen` (k,) to begin in `slots` (k,), both on the host."""
        prompts, row_of = buffers.distinct(chosen)
        sizes = [len(prompts), len(chosen), len(chosen), len(chosen)]
        asked = torch.cat([prompts, row_of, slots, chosen])
        name: Hashable = (len(rows), *sizes[:2], self._padded, replace(params, max_new_tokens=1))
        compute = partial(self._begin, buffers, rows, sizes, params)
        again = len(prompts) * self._ids.shape[1] <= _CAPTURED

        def begin() -> None:
            self._asked[: len(asked)].copy_(asked.pin_memory() if self._asked.is_cuda else asked, non_blocking=True)
            self._graphs.run(name, compute, at_first=False) if again else compute()

        return Prepared(begin, self._graphs.has(name))

    def _begin(self, buffers: Buffers, rows: Rows, sizes: list[int], params: SamplingParams) -> None:
        prompts, row_of, slots, chosen = self._asked[: sum(sizes)].split_with_sizes(sizes)
        ids, mask = self._ids[prompts], self._mask[prompts]
        width = ids.shape[1]
        logits = self.prefill(ids, mask, self._padded, rows.stored, slots, row_of)[row_of]
        rows.begin[slots] = width - mask[row_of].sum(-1)
        rows.row[slots] = chosen
        tokens, logprobs = self.sample(logits, params, buffers.uniforms[chosen, 0])
        buffers.write(chosen, torch.zeros_like(chosen), tokens, logprobs)
        rows.running[slots] = goes_on(tokens, params) & (buffers.limit > 1)
        rows.tokens[slots] = tokens
        rows.place.index_fill_(0, slots, width)
        rows.share_prompts(buffers.prompt_of)
