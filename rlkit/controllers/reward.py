"""Scores of finished responses: a Python callable, a sequence classifier, or a language model as judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rlkit.batch import RolloutBatch
from rlkit.controllers.actor import module_of
from rlkit.controllers.hosted import HostedController
from rlkit.controllers.scorers import ClassifierScorer, Judge, JudgeScorer, TextBatcher, is_causal
from rlkit.device_map import DeviceMap
from rlkit.engines.models import load_causal_lm, load_sequence_classifier, load_tokenizer
from rlkit.errors import ConfigError, RewardError
from rlkit.rewards import RewardCaller, RewardFunction
from rlkit.rewards.caller import OnError

RESERVED_TERMS = ("mean", "std", "latency_ms", "timeouts", "errors")
_NEEDED_FIELDS = {"response_length": "response_mask", "finish_reason": "finish_reasons"}


class RewardController(HostedController):
    """One named reward term: reads responses, writes `reward/<name>` (B,), NaN where it abstains.

    Args:
        model: a Python callable (see `rlkit.rewards.RewardFunction` for its parameters), a sequence classifier with one
            score or with `label`, a causal language model (it judges by yes or no), a plain module with a classifier's
            forward, or a hub id or local path (a causal language model by name needs `judge`).
        tokenizer: of a model; None loads the one that belongs to it.
        name: name of the term and of the controller; None takes the callable's own, else "reward".
        label: which output of a classifier with several is the score (its probability).
        judge: how a causal language model is asked.
        max_length: tokens a model reads at most; longer text loses its beginning.
        batch_size: texts in one forward pass of a model (16 when left out); of a batched function, samples in one call
            (all when left out).
        timeout: seconds that a call of a function may take. A plain function is then called in a process, which can be
            ended; an async one is cancelled. A per-sample function has one call a sample.
        workers: processes that call a function, for slow ones; a batched one needs `batch_size` to be spread over them.
            The function and its arguments travel pickled, and what it changes stays in its process.
        on_error: what a call of a function that raises, takes too long or gives no reward comes to. "raise" ends the
            step with a RewardError; "abstain" gives its samples NaN, logs them by name and counts them in
            `take_failures`.
        max_concurrent: calls of an async function that are awaited at the same time.
        device_map: where a model lives; None takes the actor's device.
        **from_pretrained: passed on when `model` is a name.

    Raises:
        ModelError: a name loads a model without a score head and `judge` was not given.
        RewardError: the callable's parameters cannot be filled, or the name is reserved.
        ConfigError: an option is out of range, or is one for functions and a model was given.
    """

    role = "reward"
    reads: tuple[str, ...] = ("prompts", "responses", "columns")

    def __init__(
        self,
        model: nn.Module | str | Callable[..., Any],
        tokenizer: Any = None,
        *,
        name: str | None = None,
        label: int | None = None,
        judge: Judge | None = None,
        max_length: int = 2048,
        batch_size: int | None = None,
        timeout: float | None = None,
        workers: int = 0,
        on_error: OnError = "raise",
        max_concurrent: int = 16,
        device_map: DeviceMap | None = None,
        **from_pretrained: Any,
    ) -> None:
        self.model: nn.Module | None = None
        self.caller: RewardCaller | None = None
        self.scorer: RewardFunction | ClassifierScorer | JudgeScorer
        if isinstance(model, nn.Module | str) or hasattr(model, "__fspath__"):
            if timeout is not None or workers or on_error != "raise":
                raise ConfigError("timeout, workers and on_error are for reward functions; a model takes none of them")
            load = load_causal_lm if judge is not None else load_sequence_classifier
            self.model = module_of(model, load, from_pretrained).requires_grad_(False).eval()  # type: ignore[arg-type]
            tokenizer = tokenizer if tokenizer is not None else load_tokenizer(self.model)
            batcher = TextBatcher(self.model, tokenizer, max_length, 16 if batch_size is None else batch_size)
            judged = judge is not None or is_causal(self.model)
            self.scorer = JudgeScorer(batcher, judge or Judge()) if judged else ClassifierScorer(batcher, label)
        elif callable(model):
            self.scorer = RewardFunction(model, name)
            name = self.scorer.name
            self.caller = RewardCaller(
                self.scorer,
                timeout=timeout,
                workers=workers,
                on_error=on_error,
                batch_size=batch_size,
                max_concurrent=max_concurrent,
            )
            self.reads += tuple(field for need, field in _NEEDED_FIELDS.items() if need in self.scorer.needs)
        else:
            raise RewardError(f"a reward must be a callable, a model or a path, got {type(model).__name__}")
        super().__init__(name or "reward")
        if self.name in RESERVED_TERMS:
            raise RewardError(f"{self.name!r} is the name of a metric; give the reward another name (name=...)")
        self.field = f"reward/{self.name}"
        self.writes = (self.field,)
        # A function of one response scores each as soon as it is finished; one of a whole batch may compare responses.
        self.streams = isinstance(self.scorer, RewardFunction) and not self.scorer.batched
        self.heavy = self.model is not None
        self._seconds = 0.0
        self.learns = False
        """Whether the model learns from feedback, see `learn_from_feedback`."""
        if self.model is not None:
            self.learns_from = ("values",)
        if device_map is not None:
            self.device_map = device_map

    def modules(self) -> dict[str, nn.Module]:
        """The modules this controller keeps on its device; none for a callable."""
        return {} if self.model is None else {"model": self.model}

    def run(self, batch: RolloutBatch) -> Mapping[str, Any]:
        """Scores (B,) of the batch's responses.

        Raises:
            RewardError: the scores are of the wrong number or no finite numbers, or a function raised or took too long
                (see `on_error`); names the term and the sample.
        """
        started = time.perf_counter()
        texts = (batch.prompts, batch.responses, batch.columns)
        if self.caller is not None:
            lengths = batch.response_lengths.tolist() if "response_mask" in self.reads else None
            reasons = batch.finish_reasons if "finish_reasons" in self.reads else None
            scores = self.caller.score(*texts, lengths, reasons)
        else:
            scores = self.scorer.score(*texts)
        self._seconds += time.perf_counter() - started
        return {self.field: torch.tensor(scores, dtype=torch.float32)}

    def learn_from_feedback(self, field: str) -> None:
        """Lets the model learn from a field (B,T) or (B,) of the batch: "values" of a critic, or "reward_targets".

        Called by a trainer whose dataflow leads feedback here. The weights are part of the state from then on.
        """
        assert self.model is not None
        self.learns_from = (field,)
        if not self.learns:
            self.model.requires_grad_(True)
            self.learns = True

    def differentiable_scores(self, batch: RolloutBatch) -> torch.Tensor:
        """Scores (B,) float32 of the batch's responses under the model's weights, with a gradient; dropout is off."""
        assert self.model is not None
        assert not isinstance(self.scorer, RewardFunction)
        return self.scorer.differentiable(batch.prompts, batch.responses)

    def state_dict(self) -> dict[str, Any]:
        """The model's weights where it learns."""
        return {"model": self.model.state_dict()} if self.model is not None and self.learns else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` gave; missing and unknown names raise."""
        if self.model is None or not self.learns:
            super().load_state_dict(state)
        else:
            self.model.load_state_dict(dict(state["model"]), strict=True)

    def take_latency(self) -> float:
        """Seconds spent scoring since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    @property
    def may_fail(self) -> bool:
        """Whether a call that fails costs its sample only, so that failures are worth counting."""
        return self.caller is not None and self.caller.on_error == "abstain"

    def take_failures(self) -> dict[str, int]:
        """Samples whose call failed since the last time this was asked: {"timeouts": n, "errors": m}."""
        return {"timeouts": 0, "errors": 0} if self.caller is None else self.caller.take_failures()

    def close(self) -> None:
        """Ends the processes or the event loop of a function; scoring again starts them anew."""
        if self.caller is not None:
            self.caller.close()

    def frozen_state_dict(self) -> dict[str, Any]:
        """Weights that are stored once for a whole run; none for a callable or a model that learns."""
        return {} if self.model is None or self.learns else {"model": self.model.state_dict()}

    def load_frozen_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `frozen_state_dict` gave; missing and unknown names raise."""
        if self.model is not None:
            self.model.load_state_dict(dict(state["model"]), strict=True)
