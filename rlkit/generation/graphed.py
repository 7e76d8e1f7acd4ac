"""Decoding that stays on the device: one token step is one CUDA graph, and the host looks only now and then.

Everything of a step happens on the device: the forward over the new tokens, sampling, log-probs, stopping, and writing
the result. Shapes are fixed, so the step is captured once as a CUDA graph for a number of rows and a width of the cache
and replayed from then on; replays see the weights as they are, since the trainer updates them in place. The host counts
the running rows every few tokens, and moves them together into a smaller batch when many have finished.

On the CPU the same steps run without graphs, which is how they are tested.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines.budget import is_out_of_memory
from rlkit.engines.forward import bare_model
from rlkit.engines.packing import distinct_prompts
from rlkit.generation.base import Generated, OnFinished, SamplingParams
from rlkit.generation.decoders import CachedDecoder
from rlkit.generation.fused import sample_fused
from rlkit.generation.sampling import sample
from rlkit.generation.steps import step_of
from rlkit.kernels import available

__all__ = ["GraphedDecoder"]

WIDTH_STEP = 128
"""Widths of the cache are rounded up to this, so that a graph reads at most so many columns for nothing."""
LOOK_EVERY = 16
"""Tokens between two looks of the host at how many rows still run."""
ROW_STEP = 8
"""Numbers of rows are multiples of this at least; large ones of more, so that few different numbers need a graph."""


@dataclass(frozen=True)
class _Rows:
    """Rows that decode together, b of them (those beyond the real ones never run).

    Attributes:
        stored: (layers, 2, b, key heads, capacity, head width) keys and values.
        bias: (b, 1, 1, capacity) added to attention scores: -inf where nothing may be read.
        lengths: (b, 1) position of the next token.
        tokens: (b,) the token to take in next.
        running: (b,) bool.
        row: (b,) int64, the row of the output each belongs to; rows that never run share a spare one.
    """

    stored: Tensor
    bias: Tensor
    lengths: Tensor
    tokens: Tensor
    running: Tensor
    row: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


class _Buffers:
    """Memory with fixed addresses: what rows decode in, and what they write.

    Args:
        shape: (layers, 2, most rows, key heads, capacity, head width) of the cache.
        steps: most tokens a response may have.
        dtype, device: of the cache.
    """

    def __init__(self, shape: tuple[int, ...], steps: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.capacity, self.steps = shape[2], shape[4], steps
        self.spare = self.size  # the output row that nobody reads

        def zeros(*dims: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(dims, dtype=dtype, device=device)

        self._rows = _Rows(
            stored=torch.zeros(shape, dtype=dtype, device=device),
            bias=zeros(self.size, 1, 1, self.capacity, dtype=dtype),
            lengths=zeros(self.size, 1),
            tokens=zeros(self.size),
            running=zeros(self.size, dtype=torch.bool),
            row=zeros(self.size),
        )
        self.place = zeros(1)  # column of the cache that the next token goes to
        self.time = zeros(1)  # number of the token that is sampled next
        self.uniforms = zeros(self.size + 1, steps, dtype=torch.float64)
        self.ids = zeros(self.size + 1, steps)
        self.logprobs = zeros(self.size + 1, steps, dtype=torch.float32)
        self.mask = zeros(self.size + 1, steps, dtype=torch.bool)

    def rows(self, count: int) -> _Rows:
        """The first `count` rows; all such views share their memory."""
        parts = {name: getattr(self._rows, name)[:count] for name in ("bias", "lengths", "tokens", "running", "row")}
        return _Rows(stored=self._rows.stored[:, :, :count], **parts)

    def start(self, uniforms: Tensor, pad_token_id: int) -> None:
        """Clears the output and takes the random numbers (B, T) of a call."""
        self.uniforms[: len(uniforms), : uniforms.shape[1]] = uniforms
        self.ids.fill_(pad_token_id)
        self.logprobs.zero_()
        self.mask.zero_()
        self.time.zero_()

    def result(self, input_ids: Tensor, params: SamplingParams) -> Generated:
        """What the rows of `input_ids` have written so far."""
        count = len(input_ids)
        ids, mask, logprobs = self.ids[:count], self.mask[:count], self.logprobs[:count]
        lengths = mask.sum(1)
        width = int(lengths.max())
        last = ids.gather(1, (lengths - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        stopped = torch.isin(last, torch.tensor(params.stop_token_ids, dtype=torch.int64, device=last.device))
        return Generated(
            torch.cat([input_ids, ids[:, :width]], dim=1),
            mask[:, :width].clone(),
            logprobs[:, :width].clone(),
            ["stop" if stop else "length" for stop in stopped.tolist()],
        )


class GraphedDecoder:
    """Samples responses from a dense decoder; keeps its buffers and graphs from call to call.

    Args:
        model: a model for which `suits_steps` holds.
        cache_argument: name under which its forward takes a cache.
        pad_token_id: written right of a response.
        graphs: capture steps as CUDA graphs; None does so on a CUDA device.
    """

    def __init__(self, model: nn.Module, cache_argument: str, pad_token_id: int, graphs: bool | None = None) -> None:
        self.model: Any = bare_model(model)
        self.cache_argument, self.pad_token_id = cache_argument, pad_token_id
        self.uses_graphs = next(self.model.parameters()).is_cuda if graphs is None else graphs
        self._pool: Any = None
        self._buffers: _Buffers | None = None
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
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
        buffers = self._buffers_for(count, width + steps, steps, input_ids.device)
        buffers.start(uniforms, self.pad_token_id)
        rows = self._prefill(buffers, input_ids, attention_mask, params)
        reported = torch.zeros(count, dtype=torch.bool)
        for t in range(1, steps):
            if t % LOOK_EVERY == 0 or t == 1:
                running = int(rows.running.sum())
                if on_finished is not None:
                    self._report(buffers, input_ids, rows, params, reported, on_finished)
                if not running:
                    break
                if (size := _rows_for(running)) < len(rows):
                    rows = self._shrink(buffers, rows, size, width + t)
            self._step(buffers, rows, _rounded(width + t, WIDTH_STEP, buffers.capacity), params)
        if on_finished is not None:
            self._report(buffers, input_ids, rows, params, reported, on_finished, everything=True)
        return buffers.result(input_ids, params)

    # Buffers and rows

    def _buffers_for(self, count: int, capacity: int, steps: int, device: torch.device) -> _Buffers:
        size, capacity = _rows_for(count), _rounded(capacity, WIDTH_STEP)
        kept = self._buffers
        if kept is None or kept.size < size or kept.capacity != capacity or kept.steps < steps:
            self.release()
            layers, key_heads, head_width = self.step.cache_shape
            shape = (layers, 2, size, key_heads, capacity, head_width)
            kept = self._buffers = _Buffers(shape, steps, next(self.model.parameters()).dtype, device)
        return kept

    def release(self) -> None:
        """Gives up buffers and graphs; the next call makes them anew."""
        self._graphs.clear()
        self._buffers = self._pool = None

    def _prefill(self, buffers: _Buffers, input_ids: Tensor, attention_mask: Tensor, params: SamplingParams) -> _Rows:
        """One forward over each distinct prompt, its keys and values copied to every row of it; the first token."""
        count, width = input_ids.shape
        first, row_of = distinct_prompts(input_ids, attention_mask)
        prompt = CachedDecoder(self.model, self.cache_argument, whole=True)
        logits = prompt.prefill(input_ids[first], attention_mask[first])
        rows = buffers.rows(_rows_for(count))
        for stored, layer in zip(rows.stored, prompt.cache.layers, strict=True):
            stored[0, :count, :, :width] = layer.keys[row_of]
            stored[1, :count, :, :width] = layer.values[row_of]
        rows.bias.fill_(float("-inf"))
        rows.bias[:, 0, 0, :width] = 0.0
        rows.bias[:count, 0, 0, :width].masked_fill_(~attention_mask, float("-inf"))
        rows.lengths.fill_(1)
        rows.lengths[:count] = attention_mask.sum(-1, keepdim=True)
        rows.row.fill_(buffers.spare)
        rows.row[:count] = torch.arange(count, device=rows.row.device)
        rows.running.zero_()
        rows.running[:count] = True
        buffers.place.fill_(width)
        whole = logits.new_zeros(len(rows), logits.shape[-1])
        whole[:count] = logits[row_of]
        self._take(buffers, rows, whole, params)
        return rows

    def _shrink(self, buffers: _Buffers, rows: _Rows, size: int, width: int) -> _Rows:
        """The first `size` rows, once running ones beyond them have taken the places of finished ones among them.

        Args:
            width: columns of the cache that have been written.
        """
        moving = rows.running[size:].nonzero().flatten() + size
        places = (~rows.running[:size]).nonzero().flatten()[: len(moving)]
        for part in (rows.bias, rows.lengths, rows.tokens, rows.running, rows.row):
            part[places] = part[moving]
        written = rows.stored[..., :width, :]
        written[:, :, places] = written[:, :, moving]
        return buffers.rows(size)

    # One token

    def _step(self, buffers: _Buffers, rows: _Rows, width: int, params: SamplingParams) -> None:
        if not self.uses_graphs:
            self._forward(buffers, rows, width, params)
            return
        key = (len(rows), width, replace(params, max_new_tokens=1))
        graph = self._graphs.get(key)
        if graph is None:
            try:
                graph = self._graphs[key] = self._capture(buffers, rows, width, params)
            except RuntimeError as error:
                if any(is_out_of_memory(cause) for cause in _chain(error)):
                    raise
                self._go_on_without_graphs(error)
                self._forward(buffers, rows, width, params)
                return
        graph.replay()

    def _go_on_without_graphs(self, error: RuntimeError) -> None:
        """A model's own forward may do what a graph cannot hold, such as asking the host for a number."""
        self.uses_graphs = False
        self._graphs.clear()
        self._pool = None
        warnings.warn(
            f"{type(self.model).__name__}'s decoding step cannot be captured as a CUDA graph ({error}); its tokens are "
            "the same without, and take longer",
            RuntimeWarning,
            stacklevel=2,
        )

    def _capture(self, buffers: _Buffers, rows: _Rows, width: int, params: SamplingParams) -> torch.cuda.CUDAGraph:
        """A graph of the step. What warming up changes is put back."""
        moving = (rows.bias, rows.lengths, rows.tokens, rows.running, buffers.place, buffers.time)
        written = (buffers.ids, buffers.logprobs, buffers.mask)
        before = [tensor.clone() for tensor in (*moving, *written)]
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.device)
        stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        try:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._forward(buffers, rows, width, params)
            current.wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool):
                self._forward(buffers, rows, width, params)
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own in force
            for tensor, value in zip((*moving, *written), before, strict=True):
                tensor.copy_(value)
        return graph

    def _forward(self, buffers: _Buffers, rows: _Rows, width: int, params: SamplingParams) -> None:
        rows.bias.index_fill_(3, buffers.place, 0.0)
        stored = rows.stored[..., :width, :]
        logits = self.step(rows.tokens, rows.lengths, buffers.place, stored, rows.bias[..., :width])
        rows.lengths.add_(1)
        buffers.place.add_(1)
        self._take(buffers, rows, logits, params)

    def _take(self, buffers: _Buffers, rows: _Rows, logits: Tensor, params: SamplingParams) -> None:
        """Samples a token a row and writes it down; rows that sampled a stop token end."""
        uniforms = buffers.uniforms.index_select(1, buffers.time).squeeze(1)[rows.row]
        tokens, logprobs = self.sample(logits, params, uniforms)
        places = (rows.row, buffers.time.expand(len(rows)))
        buffers.ids.index_put_(places, torch.where(rows.running, tokens, self.pad_token_id))
        buffers.logprobs.index_put_(places, torch.where(rows.running, logprobs, 0.0))
        buffers.mask.index_put_(places, rows.running)
        rows.tokens.copy_(tokens)
        for stop in params.stop_token_ids:
            rows.running.logical_and_(tokens != stop)
        buffers.time.add_(1)

    # Reports and weights

    def _report(
        self,
        buffers: _Buffers,
        input_ids: Tensor,
        rows: _Rows,
        params: SamplingParams,
        reported: Tensor,
        on_finished: OnFinished,
        everything: bool = False,
    ) -> None:
        running = torch.zeros(buffers.spare + 1, dtype=torch.bool, device=rows.row.device)
        if not everything:
            running[rows.row[rows.running]] = True
        fresh = (~running[: len(reported)].cpu() & ~reported).nonzero().flatten().tolist()
        if fresh:
            reported[fresh] = True
            on_finished(fresh, buffers.result(input_ids, params).select(fresh))

    def _weight_addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self.model.parameters())

    def _read_weights(self) -> None:
        """Makes the step, which refers to the weights where they lie now."""
        self.device = next(self.model.parameters()).device
        self.sample = sample_fused if available(self.device) else sample
        self.step = step_of(self.model)
        self._addresses = self._weight_addresses()

    def _forget_graphs_of_moved_weights(self) -> None:
        """Graphs read weights where they lay when captured; a run that was handed over and back has others."""
        if self._weight_addresses() != self._addresses:
            self.release()
            self._read_weights()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it was raised while handling."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _rows_for(count: int) -> int:
    """Rows of a batch that holds so many: the next of four sizes between a power of two and the one after it."""
    return _rounded(count, max(ROW_STEP, 2 ** max(count.bit_length() - 3, 0)))


def _rounded(number: int, step: int, most: int | None = None) -> int:
    """`number` rounded up to a multiple of `step`, `most` at most."""
    up = -(-number // step) * step
    return up if most is None else min(up, most)
