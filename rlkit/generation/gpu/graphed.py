"""Decoding that stays on the device: one token step is one CUDA graph, and the host looks only now and then.

Everything of a step happens on the device: the forward over the new tokens, sampling, log-probs, stopping, and writing
the result. Shapes are fixed, so the step is captured once as a CUDA graph for a number of rows (and for a width of the
cache, where the model's own forward reads it) and replayed from then on; replays see the weights as they are, since the
trainer updates them in place.

Rows decode in slots, as many as memory has room for. Every few tokens the host looks who still runs, while the device
works on the next token: slots of finished rows go to rows that wait, and once nobody waits the running ones move
together into a smaller batch.

On the CPU the same steps run without graphs, which is how they are tested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines.budget import free_bytes
from rlkit.engines.forward import bare_model
from rlkit.generation.base import Generated, OnFinished, SamplingParams
from rlkit.generation.gpu.admission import Admission
from rlkit.generation.gpu.fused import sample_fused, take_in_fused
from rlkit.generation.gpu.graphs import Graphs
from rlkit.generation.gpu.prefill import prefill_of
from rlkit.generation.gpu.slots import Buffers, Rows, take_in
from rlkit.generation.gpu.steps import step_of
from rlkit.generation.sampling import goes_on, sample
from rlkit.kernels import available

__all__ = ["GraphedDecoder"]

WIDTH_STEP = 128
"""Widths of the cache are rounded up to this, so that a graph reads at most so many columns for nothing."""
LOOK_EVERY = 8
"""Tokens between two looks of the host at how many rows still run."""
REFILL = 16
"""Rows that wait begin in groups of one in so many slots: each time costs a forward over their prompts."""
LEAD = 8
"""Tokens that running rows still get before, so that the device has work while the host launches that forward."""
ROW_STEP = 8
"""Numbers of rows are multiples of this at least; large ones of more, so that few different numbers need a graph."""


class GraphedDecoder:
    """Samples responses from a dense decoder; keeps its buffers and graphs from call to call.

    Args:
        model: a model for which `suits_steps` holds.
        cache_argument: name under which its forward takes a cache.
        pad_token_id: written right of a response.
        graphs: capture steps as CUDA graphs; None does so on a CUDA device.
        slots: most rows that decode at once; None takes what half of the free memory holds.

    Attributes:
        overlaps: whether the device works on while the host looks and prepares, which costs finished rows a token or
            so; as graphs are used.
    """

    def __init__(
        self,
        model: nn.Module,
        cache_argument: str,
        pad_token_id: int,
        graphs: bool | None = None,
        slots: int | None = None,
    ) -> None:
        self.model: Any = bare_model(model)
        self.cache_argument, self.pad_token_id, self.most_slots = cache_argument, pad_token_id, slots
        self._wants_graphs = graphs
        self._buffers: Buffers | None = None
        self._room = 0
        self._read_weights()

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        params: SamplingParams,
        uniforms: Tensor,
        on_finished: OnFinished | None = None,
    ) -> Generated:
        """Samples one response a row.

        Args:
            input_ids, attention_mask: (B, P), padded on the left.
            params: the distribution and when to stop.
            uniforms: (B, max_new_tokens) float64 in [0, 1): the random number of each token.
            on_finished: told of finished rows when the host looks.
        """
        self._forget_graphs_of_moved_weights()
        count, width = input_ids.shape
        steps = params.max_new_tokens
        buffers = self._buffers_for(count, width + steps, steps)
        buffers.start(input_ids, attention_mask, uniforms, self.pad_token_id)
        self._admission.start(buffers, input_ids, attention_mask)
        rows = buffers.rows.first(min(_rows_for(count), buffers.slots))
        rows.clear(width, buffers.spare)
        begun = torch.zeros(len(rows), dtype=torch.int64)  # step at which each slot's row began
        oldest, admitted, told = 0, 0, torch.zeros(count, dtype=torch.bool)
        t = 0

        def take_step() -> None:
            nonlocal t
            self._step(buffers, rows, self._reach(buffers, width + t - oldest + 1), params)
            t += 1

        while True:
            all_end = t - oldest >= steps - 1
            if t % LOOK_EVERY == 0 or t == 1 or all_end:
                running, arrived = self._asked(rows)
                if self.overlaps and t > 0 and not all_end:
                    take_step()
                arrived()
                oldest = int(begun[running].min()) if running.any() else t
                if on_finished is not None:
                    self._report(buffers, rows, params, told, on_finished, admitted)
                free = (~running).nonzero().flatten()
                if entering := _entering(len(free), count - admitted, len(rows)):
                    slots, chosen = free[:entering], torch.arange(admitted, admitted + entering)
                    entry = self._admission.prepare(buffers, rows, slots, chosen, params)
                    for _ in range(LEAD if self.overlaps and running.any() and not entry.is_quick else 0):
                        take_step()
                    entry.begin()
                    begun[slots] = t
                    admitted += entering
                    continue
                if not running.any():
                    break
                if admitted == count and (size := _rows_for(int(running.sum()))) < len(rows):
                    begun = self._shrink(rows, running, begun, size, width + t - oldest)
                    rows = rows.first(size)
                    rows.share_prompts(buffers.prompt_of)
            take_step()
        if on_finished is not None:
            self._report(buffers, rows, params, told, on_finished, count)
        return buffers.result(params)

    def _asked(self, rows: Rows) -> tuple[Tensor, Callable[[], None]]:
        """Which slots run (b,), on the host, once the function that comes with it has been called."""
        running = rows.running.to("cpu", non_blocking=True, copy=True)
        if self.device.type != "cuda":
            return running, lambda: None
        return running, torch.cuda.current_stream(self.device).record_event().synchronize

    def _reach(self, buffers: Buffers, width: int) -> int:
        """Columns that a step is told, where rows have used so many: few different numbers, since each is a graph."""
        return _rounded(width, WIDTH_STEP, buffers.capacity) if self.step.reads_widths else buffers.capacity

    # Slots

    def _buffers_for(self, count: int, capacity: int, steps: int) -> Buffers:
        capacity, kept = _rounded(capacity, WIDTH_STEP), self._buffers
        fits = kept is not None and kept.capacity == capacity and kept.steps >= steps and kept.count >= count
        if kept is None or not fits or kept.slots < min(_rows_for(count), self._room):
            self.release()
            layers, key_heads, head_width = self.step.cache_shape
            dtype = next(self.model.parameters()).dtype
            bytes_of_slot = 2 * layers * key_heads * capacity * head_width * dtype.itemsize
            self._room = self.most_slots or _room(self.device, bytes_of_slot)
            shape = (layers, 2, min(_rows_for(count), self._room), key_heads, capacity, head_width)
            kept = self._buffers = Buffers(shape, count, steps, dtype, self.device)
        return kept

    def release(self) -> None:
        """Gives up buffers and graphs; the next call makes them anew."""
        self._graphs.clear()
        self._admission.release()
        self._buffers = None
        self._room = 0

    def _shrink(self, rows: Rows, running: Tensor, begun: Tensor, size: int, width: int) -> Tensor:
        """Running rows beyond the first `size` slots take those of finished ones among them; begins (size,) of them.

        Args:
            rows: all slots.
            running, begun: (b,) of each, on the host.
            size: at least as many as run.
            width: columns of the cache that have been written.
        """
        moving = running[size:].nonzero().flatten() + size
        places = (~running[:size]).nonzero().flatten()[: len(moving)]
        if len(moving):
            rows.move(places.to(self.device), moving.to(self.device), width)
            begun[places] = begun[moving]
        return begun[:size]

    # One token

    def _step(self, buffers: Buffers, rows: Rows, width: int, params: SamplingParams) -> None:
        self._graphs.run(
            (len(rows), width, replace(params, max_new_tokens=1)),
            partial(self._forward, buffers, rows, width, params),
            (*rows.state, buffers.ids, buffers.logprobs, buffers.mask),
        )

    def _forward(self, buffers: Buffers, rows: Rows, width: int, params: SamplingParams) -> None:
        logits = self.step(rows, width)
        tokens, logprobs = self.sample(logits, params, buffers.uniforms[rows.row, rows.time])
        self.take_in(buffers, rows, tokens, logprobs, goes_on(tokens, params))

    # Reports and weights

    def _report(
        self,
        buffers: Buffers,
        rows: Rows,
        params: SamplingParams,
        told: Tensor,
        on_finished: OnFinished,
        begun: int,
    ) -> None:
        """Tells of rows among the first `begun` of the batch that run no more; `told` (B,) holds who was told of."""
        running = torch.zeros(len(told) + 1, dtype=torch.bool)
        running[rows.row[rows.running].cpu()] = True
        fresh = (~running[:begun] & ~told[:begun]).nonzero().flatten().tolist()
        if fresh:
            told[fresh] = True
            on_finished(fresh, buffers.result(params).select(fresh))

    def _in_force(self) -> tuple[Any, ...]:
        """What a graph has for good: where the weights lie, and which adapters are in force, at which scale."""
        switched = [
            (
                tuple(module.active_adapters),
                module.disable_adapters,
                tuple(getattr(module, "merged_adapters", ())),
                tuple(getattr(module, "scaling", {}).items()),
            )
            for module in self.model.modules()
            if isinstance(getattr(module, "disable_adapters", None), bool)  # of transformers' own models, a method
        ]
        return (*(parameter.data_ptr() for parameter in self.model.parameters()), *switched)

    def _read_weights(self) -> None:
        """Makes the step, which refers to the weights where they lie now."""
        self.device = next(self.model.parameters()).device
        active = self.device.type == "cuda" if self._wants_graphs is None else self._wants_graphs
        self.overlaps = active
        self._graphs = Graphs(self.device, f"{type(self.model).__name__}'s decoding step", active)
        self.sample, self.take_in = (sample_fused, take_in_fused) if available(self.device) else (sample, take_in)
        self.step = step_of(self.model)
        prefill = prefill_of(self.model, self.cache_argument, self.step)
        self._admission = Admission(prefill, self.sample, self.device, active)
        self._captured = self._in_force()

    def _forget_graphs_of_moved_weights(self) -> None:
        """Graphs read weights where they lay when captured; a run that was handed over and back has others.

        They also compute with the adapters that were in force then; others may have been switched on since.
        """
        if self._in_force() != self._captured:
            self.release()
            self._read_weights()


def _entering(free: int, waiting: int, slots: int) -> int:
    """How many rows begin where so many slots are free: all that wait, or whole groups, so that numbers come again."""
    group = max(slots // REFILL, 1)
    return waiting if waiting <= free else free // group * group


def _room(device: torch.device, bytes_of_slot: int) -> int:
    """Slots that half of a GPU's free memory holds; on the CPU memory sets no limit."""
    if device.type != "cuda":
        return sys.maxsize
    return max(free_bytes(device) // 2 // bytes_of_slot // ROW_STEP, 1) * ROW_STEP


def _rows_for(count: int) -> int:
    """Rows of a batch that holds so many: the next of four sizes between a power of two and the one after it."""
    return _rounded(count, max(ROW_STEP, 2 ** max(count.bit_length() - 3, 0)))


def _rounded(number: int, step: int, most: int | None = None) -> int:
    """`number` rounded up to a multiple of `step`, `most` at most."""
    up = -(-number // step) * step
    return up if most is None else min(up, most)
