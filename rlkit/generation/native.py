"""Batched decoding on the trainer's own module: no second copy of the weights, no second forward for log-probs."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines.forward import bare_model, cache_argument, device_of, evaluation_mode
from rlkit.engines.models import context_length
from rlkit.engines.packing import distinct_prompts
from rlkit.generation.base import Generated, OnFinished, SamplingParams, Synced, require_prompts
from rlkit.generation.cpu.columns import ColumnDecoder, suits_columns
from rlkit.generation.cpu.compiled import CompiledDecoder, suits_compiled
from rlkit.generation.decoders import CachedDecoder, Decoder, UncachedDecoder
from rlkit.generation.gpu.graphed import GraphedDecoder
from rlkit.generation.gpu.steps import suits_steps
from rlkit.generation.llama import LlamaDecoder, is_llama_like
from rlkit.generation.sampling import sample

__all__ = ["NativeGenerator"]


class NativeGenerator:
    """Samples from a causal language model with a key-value cache; rows that have finished leave the batch.

    The model is used as it is at each call, in evaluation mode, and gets its modes back afterwards. A plain module
    whose forward takes no cache is run over the whole sequence for every token, which is slower.

    On the CPU the same `rng` state and the same batch give the same bits. A row's uniform numbers are its own, so the
    other rows change its tokens only where rounding in a matrix product of another height decides. (With numba, for
    the Llama family in fp32, only a prefill of many tokens has such products.)
    """

    def __init__(self, model: nn.Module, pad_token_id: int | None = None) -> None:
        """
        Args:
            model: the module that is trained (`transformers` causal LM, with or without adapters, or a plain module).
            pad_token_id: written right of a response; its value is never read. Default: the model's, else 0.
        """
        self.model = model
        configured = getattr(getattr(bare_model(model), "config", None), "pad_token_id", None)
        self.pad_token_id = next((token for token in (pad_token_id, configured) if token is not None), 0)
        self._graphed: GraphedDecoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_graphed": None}  # buffers and graphs belong to a process

    def sync(self, model: nn.Module, version: Hashable) -> Synced:
        """Nothing to do: the trainer's own module is read in place."""
        return Synced()

    def sleep(self) -> None:
        """Nothing to do. On a GPU the key-value cache and its graphs stay, so that the next call captures nothing."""

    def spare(self) -> bool:
        """On a GPU, the key-value cache and its graphs, which the next call makes again."""
        kept = self._graphed is not None
        self.release()
        return kept

    def release(self) -> None:
        """Gives up memory kept from call to call."""
        self._graphed = None

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        params: SamplingParams,
        rng: torch.Generator,
        on_finished: OnFinished | None = None,
    ) -> Generated:
        """See `rlkit.generation.base.Generator.generate`."""
        device = device_of(self.model)
        input_ids, attention_mask = input_ids.to(device), attention_mask.to(device).bool()
        require_prompts(input_ids, attention_mask, params, context_length(self.model))
        uniforms = torch.rand(
            len(input_ids), params.max_new_tokens, generator=rng, dtype=torch.float64, device=rng.device
        ).to(device)
        graphed = self._on_device(device)
        if graphed is not None:
            with torch.no_grad(), evaluation_mode(self.model):
                return graphed.generate(input_ids, attention_mask, params, uniforms, on_finished)
        rollouts = _Rollouts(input_ids, params, self.pad_token_id, on_finished)
        with torch.no_grad(), evaluation_mode(self.model):
            self._decode(input_ids, attention_mask, params, uniforms, rollouts)
        return rollouts.result()

    def _on_device(self, device: torch.device) -> GraphedDecoder | None:
        """The decoder that stays on a GPU, where there is one and the model allows it."""
        cache = cache_argument(bare_model(self.model))
        if device.type != "cuda" or cache is None or not suits_steps(self.model):
            return None
        if self._graphed is None:
            self._graphed = GraphedDecoder(self.model, cache, self.pad_token_id)
        return self._graphed

    def _decode(
        self, input_ids: Tensor, attention_mask: Tensor, params: SamplingParams, uniforms: Tensor, rollouts: "_Rollouts"
    ) -> None:
        decoder = decoder_for(self.model, attention_mask.shape[1] + params.max_new_tokens)
        logits = _prefill_once_a_prompt(decoder, input_ids, attention_mask)
        for t in range(params.max_new_tokens):
            tokens, logprobs = sample(logits, params, uniforms[rollouts.rows, t])
            running = rollouts.add(t, tokens, logprobs)
            if t + 1 == params.max_new_tokens or not len(running):
                return
            if len(running) < len(tokens):
                decoder.select(running)
                tokens = tokens[running]
            logits = decoder.step(tokens)


def _prefill_once_a_prompt(decoder: Decoder, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Logits (B, V) of the first response token; the responses of a group share one forward over their prompt."""
    first, row_of = distinct_prompts(input_ids, attention_mask)
    if len(first) == len(input_ids):
        return decoder.prefill(input_ids, attention_mask)
    logits = decoder.prefill(input_ids[first], attention_mask[first])
    decoder.select(row_of)
    return logits[row_of]


def decoder_for(model: nn.Module, capacity: int) -> Decoder:
    """The fastest decoder that the model supports; `capacity` is the greatest sequence width to come."""
    cache = cache_argument(bare_model(model))
    if cache is None:
        return UncachedDecoder(model)
    if is_llama_like(model):
        if suits_compiled(model):
            return CompiledDecoder(model, cache, capacity)
        kind = ColumnDecoder if suits_columns(model) else LlamaDecoder
        return kind(model, cache, capacity)
    return CachedDecoder(model, cache)


class _Rollouts:
    """The responses written so far; knows which rows are still running."""

    def __init__(
        self, input_ids: Tensor, params: SamplingParams, pad_token_id: int, on_finished: OnFinished | None
    ) -> None:
        rows, self.prompt_width = input_ids.shape
        shape = (rows, params.max_new_tokens)
        self.ids = torch.cat([input_ids, input_ids.new_full(shape, pad_token_id)], dim=1)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=input_ids.device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=input_ids.device)
        self.finish_reasons = ["length"] * rows
        self.rows = torch.arange(rows, device=input_ids.device)
        self.stops = torch.tensor(params.stop_token_ids, dtype=torch.long, device=input_ids.device)
        self.on_finished = on_finished

    def add(self, t: int, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Append the t-th token of each running row; returns which of them (indices among the running) go on."""
        self.ids[self.rows, self.prompt_width + t] = tokens
        self.mask[self.rows, t] = True
        self.logprobs[self.rows, t] = logprobs
        stopped = torch.isin(tokens, self.stops)
        finished = self.rows[stopped].tolist()
        for row in finished:
            self.finish_reasons[row] = "stop"
        running = (~stopped).nonzero().flatten()
        self.rows = self.rows[running]
        last = t + 1 == self.mask.shape[1]
        self._report(finished + (self.rows.tolist() if last else []))
        return running

    def _report(self, finished: list[int]) -> None:
        if finished and self.on_finished is not None:
            self.on_finished(sorted(finished), self.result().select(sorted(finished)))

    def result(self) -> Generated:
        width = int(self.mask.any(0).sum())
        return Generated(
            self.ids[:, : self.prompt_width + width].clone(),
            self.mask[:, :width].clone(),
            self.logprobs[:, :width].clone(),
            list(self.finish_reasons),
        )
