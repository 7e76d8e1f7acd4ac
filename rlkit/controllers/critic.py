"""The value function: what a response is still worth before each of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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
from rlkit.engines.heads import ValueHead, load_head
from rlkit.engines.logprobs import response_states
from rlkit.engines.models import hidden_size, load_causal_lm, load_tokenizer, same_tokenizer
from rlkit.engines.recompute import activations
from rlkit.errors import ModelError
from rlkit.fields import SAMPLED_FIELDS


class CriticController(HostedController):
    """Values (B,T) of the states before each response token; learns from `returns` at its feedback port.

    Args:
        model: a language model whose last hidden states feed a scalar head: a module, a hub id or a local path. A path
            must hold a saved head (`save_head`), unless `new_head=True` asks for a fresh one; a module comes without a
            head, so it gets a fresh one.
        tokenizer: must encode as the actor's does; None loads the one that belongs to the model.
        optimizer: an optimizer built on the model's parameters, rebuilt where the model finally lives.
        trunk: an actor whose hidden states are used instead of a model of its own. One forward pass then gives values
            and log-probs, and no second set of weights is trained.
        train_trunk: let the value loss reach a shared trunk; False trains the head alone on detached states.
        new_head: start a fresh head where a path holds none.
        name: name in the dataflow.
        device_map: where the model lives; None takes the actor's device.
        **from_pretrained: passed on when `model` is a name.

    Raises:
        ModelError: both or neither of `model` and `trunk` are given, or a path holds no head.
    """

    role = "critic"
    learns_from = ("returns",)

    def __init__(
        self,
        model: nn.Module | str | None = None,
        tokenizer: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        trunk: ActorController | None = None,
        train_trunk: bool = True,
        new_head: bool = False,
        name: str | None = None,
        device_map: DeviceMap | None = None,
        **from_pretrained: Any,
    ) -> None:
        super().__init__(name)
        if (model is None) == (trunk is None):
            raise ModelError("a critic takes either a model of its own (model=...) or an actor's trunk (trunk=actor)")
        self.trunk = trunk
        self.train_trunk = train_trunk
        self.optimizer = optimizer
        self.temperature = 1.0
        self.bootstraps = False
        """Whether `run` also gives the value of the state after the last token."""
        if trunk is not None:
            self.model = trunk.model
            self.tokenizer = trunk.tokenizer
        else:
            assert model is not None
            self.model = module_of(model, load_causal_lm, from_pretrained)
            self.tokenizer = tokenizer
        self.head = ValueHead(hidden_size(self.model))
        if isinstance(model, str | Path) and not new_head:
            load_head(self.head, model)
        if device_map is not None:
            self.device_map = device_map

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        """Batch fields that `run` needs; on a shared trunk also what the responses were sampled from."""
        read = ("generated_ids", "attention_mask", "response_mask")
        return read if self.trunk is None else (*read, *SAMPLED_FIELDS)

    @property
    def writes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Batch fields that `run` returns."""
        trunk = () if self.trunk is None else ("logprobs",)
        return ("values", *trunk, *(("bootstrap_values",) if self.bootstraps else ()))

    def require_tokenizer_of(self, actor: ActorController) -> None:
        """Raises ModelError where the critic reads other token ids than the actor writes.

        A critic given without a tokenizer and without a name to load one from is taken to read the actor's ids, as
        long as its vocabulary is large enough.
        """
        if self.trunk is not None:
            return
        if self.tokenizer is None:
            self.tokenizer = _own_tokenizer(self.model, actor)
        if not same_tokenizer(self.tokenizer, actor.tokenizer):
            raise ModelError(
                f"critic {self.name!r} and actor {actor.name!r} have different tokenizers. Values belong to the "
                "actor's tokens one by one, so the critic must read the same ids: use a critic of the actor's model "
                "family, or CriticController(trunk=actor)"
            )

    def modules(self) -> dict[str, nn.Module]:
        """The modules this controller keeps on its device; the head alone where the trunk is the actor's."""
        return {"head": self.head} if self.trunk is not None else {"model": self.model, "head": self.head}

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        """Values (B,T) before the update; on a shared trunk also the policy's log-probs (B,T), from the same pass.

        With `bootstraps` also the value (B,) of the state after each response's last token.
        """
        return in_parts(self.scoring, batch, packs(self.model), self._score)

    def _score(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        read = _one_token_longer(batch) if self.bootstraps else batch
        fields: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            if self.trunk is None:
                values = self.head(self.states(read))
            else:
                scores = self.trunk.scores(read, batch.sampled(self.temperature), hidden=True)
                values = self.head(scores.hidden)
                fields["logprobs"] = scores.logprobs[:, : batch.response_width] * batch.response_mask
        if self.bootstraps:
            fields["bootstrap_values"] = values.gather(1, batch.response_lengths.unsqueeze(1)).squeeze(1)
        return {"values": values[:, : batch.response_width], **fields}

    @property
    def trained_module(self) -> nn.Module:
        """What learns from the value loss: model and head, or the head alone on a shared trunk."""
        return self.head if self.trunk is not None else nn.ModuleDict(self.modules())

    def states(self, batch: RolloutBatch) -> torch.Tensor:
        """States (B,T,H) before each response token, from the critic's own model."""
        with evaluation_mode(self.model), activations(self.model, self.activations):
            return response_states(
                self.model,
                batch.generated_ids.to(self.device),
                batch.full_attention_mask.to(self.device),
                batch.prompt_width,
            )

    def values_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values (B,T) of states (B,T,H); cut from the trunk's graph unless `train_trunk`."""
        shared = self.trunk is not None and not self.train_trunk
        values: torch.Tensor = self.head(hidden.detach() if shared else hidden)
        return values

    def state_dict(self) -> dict[str, Any]:
        return {name: module.state_dict() for name, module in self.modules().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        modules = self.modules()
        if set(state) != set(modules):
            raise ModelError(f"critic {self.name!r} keeps {sorted(modules)}, the state holds {sorted(state)}")
        for name, module in modules.items():
            module.load_state_dict(dict(state[name]), strict=True)


def _one_token_longer(batch: RolloutBatch) -> RolloutBatch:
    """The same rollouts with a place after the last token, whose state is that of the finished response.

    The token put there is never read: states are those before a token.
    """
    wider = batch.resize(None, batch.response_width + 1)
    places = torch.arange(wider.response_width, device=batch.response_mask.device)
    return wider.with_fields({"response_mask": places <= batch.response_lengths.unsqueeze(1)})


def _own_tokenizer(model: nn.Module, actor: ActorController) -> Any:
    try:
        return load_tokenizer(model)
    except ModelError:
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
        if vocabulary is not None and vocabulary < len(actor.tokenizer):
            raise ModelError(
                f"the critic's vocabulary has {vocabulary} tokens, the actor's tokenizer {len(actor.tokenizer)}: it "
                "cannot read the actor's tokens. Use a critic of the actor's model family, or "
                "CriticController(trunk=actor)"
            ) from None
        return actor.tokenizer
