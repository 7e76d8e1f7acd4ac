"""Sampling with vLLM: an engine in the trainer's process that gets the trainer's weights whenever they have changed."""

import contextlib
import copy
import json
import tempfile
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.config_vllm import VllmConfig
from rlkit.engines.forward import bare_model, device_of
from rlkit.errors import GenerationError
from rlkit.generation.base import Generated, OnFinished, SamplingParams, Synced, require_prompts
from rlkit.generation.vllm.versions import COLDEST, Engine, Response, open_engine
from rlkit.generation.weights import Checkpoint, checkpoint_weights

__all__ = ["VllmGenerator"]


class VllmGenerator:
    """Samples with vLLM's offline engine. Ids go in and come out; no text is made.

    The engine is built when weights are first synced, from the model's configuration and with the model's weights;
    nothing is downloaded and no weights touch a disk. It keeps weights and key-value cache of its own on the trainer's
    device; on a GPU it gives both up while the trainer learns. The same `rng` state and the same batch give the same
    responses up to rounding: each row has a seed of its own.

    Args:
        options: settings of the engine.
        pad_token_id: written right of a response; its value is never read.
        context: most tokens of prompt and response together, unless `options` say; None takes the model's.
    """

    def __init__(
        self,
        options: VllmConfig | Mapping[str, Any] | None = None,
        pad_token_id: int = 0,
        context: int | None = None,
    ) -> None:
        self.options = options if isinstance(options, VllmConfig) else VllmConfig.from_dict(dict(options or {}))
        self.pad_token_id = pad_token_id
        self.context = context
        self._engine: Engine | None = None
        self._version: Hashable = None
        self._weights: Checkpoint | None = None

    @property
    def copied_directly(self) -> bool:
        """Whether the last sync was one pass of copies, without vLLM's loaders (see `direct_copy`)."""
        return self._engine is not None and self._engine.copied_directly

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None, "_version": None, "_weights": None}  # an engine belongs to a process

    def sync(self, model: nn.Module, version: Hashable) -> Synced:
        """Pushes the model's weights, adapters merged in, unless the engine has those of this version.

        Builds the engine first where there is none; that time is not counted.

        Raises:
            GenerationError: vLLM is missing, cannot serve this model, or an adapter cannot be merged.
        """
        if self._engine is None:
            self._engine = _open(model, self.options, self.context)
        engine = self._engine
        engine.wake("weights")
        synced = Synced()
        if self._version is None or version != self._version:
            self._version = None  # half a push is no version
            synced = self._push(engine, model)
            self._version = version
        engine.wake("kv_cache")
        return synced

    def sleep(self) -> None:
        """Gives up the engine's weights and cache (CUDA; vLLM cannot on the CPU, where they stay)."""
        if self._engine is not None and self._engine.can_sleep:
            self._version = None
            self._engine.sleep()

    def spare(self) -> bool:
        """Nothing beyond what `sleep` gives up."""
        return False

    def release(self) -> None:
        """Ends the engine; `sync` builds another."""
        engine, self._engine, self._version, self._weights = self._engine, None, None, None
        if engine is not None:
            engine.close()

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        params: SamplingParams,
        rng: torch.Generator,
        on_finished: OnFinished | None = None,
    ) -> Generated:
        """See `rlkit.generation.base.Generator.generate`."""
        if self._engine is None or self._version is None:
            raise GenerationError("vLLM has no weights to sample from; call sync(model, version) before generate")
        attention_mask = attention_mask.bool()
        require_prompts(input_ids, attention_mask, params, self._engine.context, what="vLLM engine")
        if 0 < params.temperature < COLDEST:
            raise GenerationError(
                f"temperature is {params.temperature}, and vLLM samples at {COLDEST} or above; take 0 for the most "
                f"likely token, or at least {COLDEST}"
            )
        seeds = torch.randint(2**62, (len(input_ids),), generator=rng, device=rng.device).tolist()
        pairs = zip(input_ids.tolist(), attention_mask.sum(1).tolist(), strict=True)
        prompts = [row[len(row) - length :] for row, length in pairs]
        responses: dict[int, Response] = {}
        with contextlib.closing(self._engine.run(prompts, params, seeds)) as running:
            for finished in running:
                responses.update(finished)
                if on_finished is not None:
                    rows = [row for row, _ in finished]
                    on_finished(rows, self._generated(input_ids[rows], [response for _, response in finished]))
        return self._generated(input_ids, [responses[row] for row in range(len(prompts))])

    def _push(self, engine: Engine, model: nn.Module) -> Synced:
        started = time.perf_counter()
        if self._weights is None or self._weights.model is not model:
            self._weights = Checkpoint(model)
        engine.push(self._weights)  # ends when the device has the weights
        return Synced(self._weights.nbytes, time.perf_counter() - started)

    def _generated(self, input_ids: Tensor, responses: list[Response]) -> Generated:
        width = max(len(response.tokens) for response in responses)
        tokens = torch.full((len(responses), width), self.pad_token_id, dtype=torch.long)
        mask = torch.zeros(len(responses), width, dtype=torch.bool)
        logprobs = torch.zeros(len(responses), width)
        for row, response in enumerate(responses):
            length = len(response.tokens)
            tokens[row, :length] = torch.tensor(response.tokens)
            mask[row, :length] = True
            logprobs[row, :length] = torch.tensor(response.logprobs)
        device = input_ids.device
        return Generated(
            torch.cat([input_ids, tokens.to(device)], dim=1),
            mask.to(device),
            logprobs.to(device),
            [response.finish_reason for response in responses],
        )


def _open(model: nn.Module, options: VllmConfig, context: int | None) -> Engine:
    """An engine for models of this configuration, its weights not yet the model's."""
    bare = bare_model(model)
    config = getattr(bare, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        raise GenerationError(
            f"vLLM serves models with a transformers configuration, and {type(bare).__name__} has none; take "
            "generation='native'"
        )
    config = copy.deepcopy(config)
    config.architectures = [type(bare).__name__]
    if getattr(config, "tie_word_embeddings", False):  # an adapter on one of the two unties them
        config.tie_word_embeddings = not any(name.endswith("lm_head.weight") for name, _ in checkpoint_weights(model))
    dtype = options.dtype or str(next(bare.parameters()).dtype).removeprefix("torch.")
    arguments = options.arguments(max_model_len=context, dtype=dtype)
    with tempfile.TemporaryDirectory(prefix="rlkit-vllm-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(json.loads(config.to_json_string(use_diff=False))))
        return open_engine(Path(folder), device_of(model), sleep=options.sleep, arguments=arguments)
