"""The frozen policy that the KL penalty is measured against."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlkit.batch import RolloutBatch
from rlkit.controllers.actor import ActorController, module_of
from rlkit.controllers.hosted import HostedController
from rlkit.controllers.parts import in_parts
from rlkit.device_map import DeviceMap
from rlkit.engines.attention import packs
from rlkit.engines.forward import evaluation_mode
from rlkit.engines.logprobs import response_scores
from rlkit.engines.models import load_causal_lm, load_tokenizer, same_tokenizer
from rlkit.errors import ModelError
from rlkit.fields import SAMPLED_FIELDS


class ReferenceController(HostedController):
    """Log-probs of the responses under a policy that never changes.

    Args:
        model: an `ActorController`: the reference is a frozen copy of its weights as they are now, or, where the actor
            trains a fresh adapter, the same model with the adapter switched off (no copy). Or a model of its own, as
            for `ActorController`.
        tokenizer: of a model of its own; must be the actor's.
        name: name in the dataflow.
        device_map: where the model lives; None takes the actor's device.
        **from_pretrained: passed on when `model` is a name.

    Raises:
        ModelError: the actor's adapter has already been trained, so that switching it off would not give the policy
            training starts from.
    """

    role = "reference"
    reads = ("generated_ids", "attention_mask", "response_mask", *SAMPLED_FIELDS)
    writes = ("ref_logprobs",)

    def __init__(
        self,
        model: ActorController | nn.Module | str,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        device_map: DeviceMap | None = None,
        **from_pretrained: Any,
    ) -> None:
        super().__init__(name)
        self.tokenizer = tokenizer
        self.shares_actor = False
        self.temperature = 1.0
        if isinstance(model, ActorController):
            self.shares_actor = hasattr(model.model, "peft_config")
            if self.shares_actor:
                _require_fresh_adapter(model.model)
            self.model = model.model if self.shares_actor else copy.deepcopy(model.model)
            self.tokenizer = model.tokenizer
        else:
            self.model = module_of(model, load_causal_lm, from_pretrained)
            self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(self.model)
        if not self.shares_actor:
            self.model.requires_grad_(False).eval()
        if device_map is not None:
            self.device_map = device_map

    def require_tokenizer_of(self, actor: ActorController) -> None:
        """Raises ModelError where the reference reads other token ids than the actor writes."""
        if not same_tokenizer(self.tokenizer, actor.tokenizer):
            raise ModelError(
                f"reference {self.name!r} and actor {actor.name!r} have different tokenizers, so the reference would "
                "score other tokens than the actor sampled; use a reference with the actor's tokenizer"
            )

    @property
    def device(self) -> str:
        """Where the model is, the actor's or its own."""
        return str(next(self.model.parameters()).device)

    def modules(self) -> dict[str, nn.Module]:
        """The modules this controller keeps on its device; none where it shares the actor's."""
        return {} if self.shares_actor else {"model": self.model}

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        """Log-probs (B,T) of the batch's responses, sampled from the reference as they were from the policy.

        Where the sampler cut tokens off, the reference cuts by the same rule, to a set of its own. The KL between two
        such policies has no end once the policy samples a token that the reference would not; the token that was
        sampled therefore always counts as kept. So every difference of log-probs is finite, it is 0 where the two
        models are the same, and a token outside the reference's set costs what the reference thinks of it beside its
        set. Responses that were sampled greedily have log-prob 0 under both.

        Dropout is off, also in an actor's model that is in training mode.
        """
        off = self.model.disable_adapter() if self.shares_actor else contextlib.nullcontext()  # type: ignore[operator]
        with torch.no_grad(), off, evaluation_mode(self.model):
            return in_parts(self.scoring, batch, packs(self.model), self._score, batch.drawn_at_random)

    def _score(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        scores = response_scores(
            self.model,
            batch.generated_ids.to(self.device),
            batch.full_attention_mask.to(self.device),
            batch.prompt_width,
            temperature=batch.sampled(self.temperature),
        )
        return {"ref_logprobs": scores.logprobs}

    def frozen_state_dict(self) -> dict[str, Any]:
        """Weights that are stored once for a whole run; none where the actor's are shared."""
        return {} if self.shares_actor else {"model": self.model.state_dict()}

    def load_frozen_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `frozen_state_dict` gave; missing and unknown names raise."""
        if not self.shares_actor:
            self.model.load_state_dict(dict(state["model"]), strict=True)


def _require_fresh_adapter(model: nn.Module) -> None:
    """A fresh LoRA adapter has zero output projections, so the model starts equal to its base."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "lora_A" in name or "lora_embedding_A" in name:
            continue
        if ("lora_B" in name or "lora_embedding_B" in name) and not bool(parameter.any()):
            continue
        raise ModelError(
            f"the actor's adapter is not fresh ({name} is trained or lies outside the adapter), so the base model is "
            "not the policy that training starts from; pass a model of its own: ReferenceController(model=...)"
        )
