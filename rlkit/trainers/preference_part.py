"""The offline side of a trainer: pairs drawn from data and scored by the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.reference import ReferenceController
from rlkit.data.pairs import PreferenceBatch
from rlkit.data.preferences import PreferenceSource
from rlkit.dataflow import Dataflow
from rlkit.dataflow.checks import PROMPT_FIELDS
from rlkit.engines.models import context_length
from rlkit.errors import DataError
from rlkit.fields import SAMPLED_FIELDS
from rlkit.metrics import MetricsTracker
from rlkit.pipeline import Pipeline

PAIR_FIELDS = (*PROMPT_FIELDS, "generated_ids", "response_mask", *SAMPLED_FIELDS, "responses", "preferences")
"""What a batch of pairs holds before the reference has scored it."""


class PreferencePart:
    """Draws pairs and scores them.

    Args:
        pairs: as for `PreferenceSource`.
        actor: the policy that learns from them.
        reference: scores both sides; None for a loss without reference.
        config: seed and limits.
        tracker: takes spans.
        alone: whether the actor learns from nothing else, so that this is the whole dataflow of its trainer.

    Raises:
        DataError: pairs that cannot be read or are too long.
    """

    def __init__(
        self,
        pairs: Any,
        actor: ActorController,
        reference: ReferenceController | None,
        config: TrainerConfig,
        tracker: MetricsTracker,
        *,
        alone: bool,
    ) -> None:
        if pairs is None:
            raise DataError("there are no pairs to learn from: preferences=[{'prompt', 'chosen', 'rejected'}, ...]")
        self.actor = actor
        self.source = self.read(pairs, config)
        self.dataflow = Dataflow().add(actor)
        if reference is not None:
            self.dataflow.connect(actor.output, reference.input)
            if alone:
                self.dataflow.connect(reference.output, actor.feedback)
        self.pipeline = Pipeline(self.dataflow, tracker, PAIR_FIELDS, idle=[actor])

    def read(self, pairs: Any, config: TrainerConfig) -> PreferenceSource:
        """A source of these pairs within the model's context."""
        context = context_length(self.actor.model)
        if context is None:
            raise DataError("the model does not say how long its context is, so long pairs cannot be told")
        return PreferenceSource(
            pairs, self.actor.tokenizer, config.seed, max_length=context, max_prompt_length=config.max_prompt_length
        )

    def draw(self, count: int, source: PreferenceSource | None = None) -> PreferenceBatch:
        """The next `count` pairs, with `ref_logprobs` where there is a reference.

        They belong to the policy at its sampling temperature and to all of its tokens, wherever they come from.
        """
        rows = (source or self.source).next(count)
        pairs = PreferenceBatch.from_rows(rows, self.actor.pad_token_id)
        values = dict(zip(SAMPLED_FIELDS, (self.actor.sampling.temperature, 0, 1.0), strict=True))
        rollouts = pairs.rollouts.with_fields({name: [value] * 2 * len(pairs) for name, value in values.items()})
        return PreferenceBatch(self.pipeline.run(rollouts.to(self.actor.device)))

    def state_dict(self) -> dict[str, Any]:
        """Which pair comes next."""
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the state was taken. Raises as `PreferenceSource.load_state_dict`."""
        self.source.load_state_dict(state)
