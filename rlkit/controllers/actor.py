"""The policy being trained: samples responses and scores them under its current weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlkit.algorithms.truncation import Sampled
from rlkit.batch import RolloutBatch
from rlkit.controllers.base import Emit
from rlkit.controllers.hosted import HostedController
from rlkit.device_map import DeviceMap
from rlkit.engines.forward import evaluation_mode
from rlkit.engines.logprobs import EntropyMode, TokenScores, response_scores
from rlkit.engines.models import load_causal_lm, load_tokenizer
from rlkit.engines.recompute import activations
from rlkit.errors import ModelError
from rlkit.fields import SAMPLED_FIELDS
from rlkit.generation.adaptive import AdaptiveSampling
from rlkit.generation.base import Generated, Generator, SamplingParams, Synced
from rlkit.generation.native import NativeGenerator


class ActorController(HostedController):
    """The language model that is trained.

    Reads prompts, writes responses with the log-probs of the distribution that sampled them, and learns from
    `advantages` at its feedback port. Every rollout records `policy_versions`, the number of updates made before it,
    and what it was sampled from: `temperatures`, `top_ks` and `top_ps`.

    Args:
        model: a `transformers` causal language model, a plain module with the same forward, a hub id or a local path.
        tokenizer: the model's tokenizer; None loads the one that belongs to the model.
        optimizer: an optimizer built on the model's parameters; it is rebuilt with the same settings where the model
            finally lives. None lets the trainer build AdamW.
        peft_config: a `peft` configuration; trains an adapter instead of the full weights.
        name: name in the dataflow.
        device_map: where the model lives; None takes cuda:0 where there is one, else the CPU.
        **from_pretrained: passed on when `model` is a name (`dtype`, `trust_remote_code`, `offload_folder`, ...).

    Raises:
        ModelError: the model or its tokenizer cannot be found.
        TypeError: keyword arguments for loading were given along with a model that is already loaded.
    """

    role = "actor"
    reads = ("input_ids", "attention_mask")
    writes = (
        "generated_ids",
        "response_mask",
        "rollout_logprobs",
        *SAMPLED_FIELDS,
        "responses",
        "finish_reasons",
        "policy_versions",
    )
    learns_from: tuple[str, ...] = ("advantages",)

    def __init__(
        self,
        model: nn.Module | str,
        tokenizer: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        peft_config: Any = None,
        name: str | None = None,
        device_map: DeviceMap | None = None,
        **from_pretrained: Any,
    ) -> None:
        super().__init__(name)
        self.model = module_of(model, load_causal_lm, from_pretrained)
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(self.model)
        if peft_config is not None:
            self.model = _with_adapter(self.model, peft_config, optimizer)
        self.optimizer = optimizer
        if device_map is not None:
            self.device_map = device_map
        self.sampling = SamplingParams(max_new_tokens=32, stop_token_ids=self.stop_token_ids)
        self.adaptive: AdaptiveSampling | None = None
        self.rng = torch.Generator().manual_seed(0)
        self.policy_version = 0
        self.generation_seconds = 0.0
        self.synced = Synced()
        self._loads = 0
        self.generator: Generator = NativeGenerator(self.model)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the tokenizer's end token and those of the model's generation config."""
        generation = getattr(self.model, "generation_config", None)
        named = getattr(generation, "eos_token_id", None)
        ids = [named] if isinstance(named, int) else list(named or [])
        if self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        return tuple(sorted(set(ids)))

    @property
    def pad_token_id(self) -> int:
        """Id that fills unused places; masks never depend on it."""
        for name in ("pad_token_id", "eos_token_id", "unk_token_id"):
            if (value := getattr(self.tokenizer, name, None)) is not None:
                return int(value)
        return 0

    def modules(self) -> dict[str, nn.Module]:
        """The modules this controller keeps on its device."""
        return {"model": self.model}

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        """Samples one response for each prompt of the batch."""
        return self._sample(batch, None)

    def run_streaming(self, batch: RolloutBatch, emit: Emit) -> Mapping[str, Any]:
        """Samples like `run` and hands each response on as soon as it is finished."""
        return self._sample(batch, emit)

    def sample_apart(self, batch: RolloutBatch, sampling: SamplingParams) -> Mapping[str, Any]:
        """One response for each prompt under other sampling settings; leaves the random state as it is."""
        self._sync()
        generated = self.generator.generate(
            batch.input_ids.to(self.device), batch.attention_mask.to(self.device), sampling, torch.Generator()
        )
        return self._fields(generated, [sampling] * len(batch))

    def scores(
        self, batch: RolloutBatch, temperature: float | Sampled, *, entropy: EntropyMode = None, hidden: bool = False
    ) -> TokenScores:
        """Log-probs (B,T) of the batch's responses under the current weights, in one forward pass.

        Dropout is off, in the update too: before it, the ratio of new to old policy is then exactly 1.

        Args:
            batch: rollouts with `generated_ids`, `attention_mask` and `response_mask`.
            temperature: of the distribution that the log-probs belong to, or all of it: `batch.sampled()`.
            entropy: also return the entropy (B,T) of that distribution, in nats: its "value", or "differentiable".
            hidden: also return the states (B,T,H) before each response token.
        """
        with evaluation_mode(self.model), activations(self.model, self.activations):
            return response_scores(
                self.model,
                batch.generated_ids,
                batch.full_attention_mask,
                batch.prompt_width,
                temperature=temperature,
                entropy=entropy,
                hidden=hidden,
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": trained_state(self.model),
            "rng": self.rng.get_state(),
            "policy_version": self.policy_version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_trained_state(self.model, state["model"])
        self._loads += 1
        self.rng.set_state(state["rng"])
        self.policy_version = int(state["policy_version"])

    def frozen_state_dict(self) -> dict[str, Any]:
        """The base model of an adapter, which is stored once for a whole run; nothing for full fine-tuning."""
        state = self.model.state_dict()
        trained = trained_state(self.model)
        base = {name: tensor for name, tensor in state.items() if name not in trained}
        return {"model": base} if base else {}

    def load_frozen_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `frozen_state_dict` gave; missing and unknown names raise."""
        expected = set(self.frozen_state_dict().get("model", {}))
        require_names(expected, state["model"])
        self.model.load_state_dict(dict(state["model"]), strict=False)
        self._loads += 1

    def take_synced(self) -> Synced:
        """Weights handed to the generator since this was last asked."""
        synced, self.synced = self.synced, Synced()
        return synced

    def _sync(self) -> None:
        """Gives the generator the current weights, which updates and loading change."""
        self.synced += self.generator.sync(self.model, (self.policy_version, self._loads))

    def _sample(self, batch: RolloutBatch, emit: Emit | None) -> Mapping[str, Any]:
        ids, mask, sampling, rule = batch.input_ids, batch.attention_mask, self.sampling, self.adaptive
        ids, mask = ids.to(self.device), mask.to(self.device)
        settings = [sampling] * len(batch) if rule is None else rule.settings(mask, sampling)

        def hand_on(rows: list[int], finished: Generated) -> None:
            if emit is not None:
                emit(rows, self._fields(finished, [settings[row] for row in rows]))

        report = hand_on if emit is not None else None
        self._sync()
        started = time.perf_counter()
        if rule is None:
            generated = self.generator.generate(ids, mask, sampling, self.rng, report)
        else:
            generated = rule.generate(self.generator, ids, mask, sampling, self.rng, report, self.pad_token_id)
        self.generation_seconds = time.perf_counter() - started
        return self._fields(generated, settings)

    def _fields(self, generated: Generated, settings: Sequence[SamplingParams]) -> dict[str, Any]:
        width = generated.response_mask.shape[1]
        tails = generated.generated_ids[:, generated.generated_ids.shape[1] - width :].cpu()
        lengths = generated.response_mask.sum(dim=1).tolist()
        ids = [tail[:length].tolist() for tail, length in zip(tails, lengths, strict=True)]
        return {
            "generated_ids": generated.generated_ids,
            "response_mask": generated.response_mask,
            "rollout_logprobs": generated.rollout_logprobs,
            "temperatures": torch.tensor([setting.temperature for setting in settings], dtype=torch.float32),
            "top_ks": torch.tensor([setting.top_k for setting in settings], dtype=torch.int64),
            "top_ps": torch.tensor([setting.top_p for setting in settings], dtype=torch.float32),
            "responses": self.tokenizer.batch_decode(ids, skip_special_tokens=True),
            "finish_reasons": list(generated.finish_reasons),
            "policy_versions": torch.full((len(ids),), self.policy_version, dtype=torch.int64),
        }


def module_of(
    model: nn.Module | str | Path, load: Callable[..., nn.Module], from_pretrained: Mapping[str, Any]
) -> nn.Module:
    """The module itself, or the one that a name loads.

    Raises:
        TypeError: keyword arguments for loading were given along with a module.
        ModelError: `model` is neither.
    """
    if isinstance(model, nn.Module):
        if from_pretrained:
            raise TypeError(f"{', '.join(from_pretrained)} apply to a model given by name; this one is already loaded")
        return model
    if isinstance(model, str | Path):
        return load(model, **from_pretrained)
    raise ModelError(f"a model must be a module, a hub id or a local path, got {type(model).__name__}")


def trained_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Names and tensors of a module's persistent state; adapters' alone where a `peft` model trains nothing else."""
    state = module.state_dict()
    if not hasattr(module, "peft_config"):
        return state
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in state.items() if name in trained}


def load_trained_state(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Loads what `trained_state` gave; missing and unknown names raise."""
    require_names(set(trained_state(module)), state)
    module.load_state_dict(dict(state), strict=not hasattr(module, "peft_config"))


def require_names(expected: set[str], state: Mapping[str, Any]) -> None:
    """Raises ModelError where a state's names are not those expected."""
    if odd := sorted(expected ^ set(state)):
        raise ModelError(f"weights do not fit the model: {len(odd)} names differ, first {odd[0]!r}")


def _with_adapter(model: nn.Module, peft_config: Any, optimizer: torch.optim.Optimizer | None) -> nn.Module:
    if optimizer is not None:
        raise ModelError(
            "an optimizer built before the adapter holds none of its parameters; leave optimizer out, or pass "
            "peft.get_peft_model(model, config) as the model and build the optimizer on that"
        )
    import peft

    adapted: nn.Module = peft.get_peft_model(model, peft_config)
    return adapted
