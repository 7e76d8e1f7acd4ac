"""The learning half of a step: passes over a batch, minibatches, micro-batches, optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkit.batch import RolloutBatch
from rlkit.controllers.parts import free_cached, load_of
from rlkit.data.pairs import PreferenceBatch
from rlkit.engines.budget import Load, TokenBudget, is_out_of_memory
from rlkit.engines.train import TrainEngine
from rlkit.errors import CheckpointError
from rlkit.metrics import MetricsTracker
from rlkit.schedules import learning_rate
from rlkit.trainers.nodes import HasConfig
from rlkit.trainers.objectives import Objective


@dataclass(frozen=True)
class Lesson:
    """What one step learns from: a batch under a loss.

    Attributes:
        objective: the loss.
        batch: rollouts or pairs, as the loss takes them.
        share: factor on the loss, where several are learned from together.
    """

    objective: Objective[Any]
    batch: RolloutBatch | PreferenceBatch
    share: float = 1.0


class Learner:
    """Makes optimizer updates from lessons; those of one step are learned from together, update by update.

    Args:
        live: holder of the settings in force.
        engines: what is trained, by name; the first one's updates count as those of the policy.
        tracker: takes norms, rates and spans.
        spare: gives up memory that others keep for speed alone, and says whether there was any; asked when memory
            runs out, before passes get smaller.
    """

    def __init__(
        self,
        live: HasConfig,
        engines: Mapping[str, TrainEngine],
        tracker: MetricsTracker,
        spare: Callable[[], bool] = lambda: False,
    ) -> None:
        self.live, self.engines, self.tracker, self.spare = live, dict(engines), tracker, spare
        config = live.config
        self.budget = TokenBudget(config.micro_batch_size, config.micro_batch_tokens, config.use_dynamic_batching)
        self.order = torch.Generator().manual_seed(live.config.seed)

    @property
    def device(self) -> torch.device:
        """Where the policy learns."""
        return next(iter(self.engines["policy"].parameters.values())).device

    def rates(self, step: int) -> dict[str, float]:
        """Learning rate of each role at a step (counted from 0), after warm-up and decay."""
        config = self.live.config
        assert config.lr is not None
        peaks = {"actor": config.lr, "critic": config.critic_lr, "reward": config.reward_lr}
        return {
            role: learning_rate(
                config.lr_schedule, config.lr if peak is None else peak, step, config.warmup_steps, config.total_steps
            )
            for role, peak in peaks.items()
        }

    def learn(self, lessons: Sequence[Lesson], step: int) -> int:
        """Makes `ppo_epochs` passes over the lessons at the learning rates of `step`.

        The first lesson decides how many minibatches a pass has; the others are cut into as many pieces.

        Returns:
            Updates made to the policy; those left out for non-finite gradients do not count.
        """
        if not lessons:
            return 0
        config = self.live.config
        rates = self.rates(step)
        for engine in self.engines.values():
            engine.clear()
            engine.set_lr({group.name: rates[group.role] for group in engine.groups})
        self.tracker.add("train/lr", rates["actor"])
        self.budget.look_at_memory(self.device)
        if self.budget.limit is not None:
            self.tracker.add("train/micro_batch_tokens", self.budget.limit)
        updates, size = 0, config.minibatch_size or len(lessons[0].batch)
        count = -(-len(lessons[0].batch) // size)
        for epoch in range(config.ppo_epochs):
            pieces = [self._pieces(lesson.batch, count, size if lesson is lessons[0] else None) for lesson in lessons]
            for index, parts in enumerate(zip(*pieces, strict=True)):
                while not self._accumulated(lessons, parts, first=epoch == index == 0):
                    pass
                updates += self._apply()
        return updates

    def _pieces(
        self, batch: RolloutBatch | PreferenceBatch, count: int, size: int | None
    ) -> Iterator[RolloutBatch | PreferenceBatch]:
        """The batch in `count` minibatches, shuffled: of `size` units each, or as equal as can be."""
        if count == 1:
            yield batch
            return
        units = len(batch)
        order = torch.randperm(units, generator=self.order)
        for index in range(count):
            ends = (
                (index * size, (index + 1) * size) if size else (units * index // count, units * (index + 1) // count)
            )
            yield batch.select(order[slice(*ends)])

    def _accumulated(self, lessons: Sequence[Lesson], minibatches: Sequence[Any], first: bool) -> bool:
        """The gradients of one update; False, with nothing left of them, when memory ran out and it is to try again."""
        minibatches = [lesson.objective.needed(batch) for lesson, batch in zip(lessons, minibatches, strict=True)]
        loads = [load_of(batch) for batch in minibatches]
        cuts = [self.budget.parts(load, it.objective.packed) for it, load in zip(lessons, loads, strict=True)]
        try:
            with self.tracker.attempt():
                for lesson, batch, load, parts in zip(lessons, minibatches, loads, cuts, strict=True):
                    self._accumulate(lesson, batch, load, parts, first)
            return True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Here the error no longer holds what was computed.
        for engine in self.engines.values():
            engine.clear()
        spared = self.spare()
        free_cached()
        if spared:
            return False
        tried = [
            (load.tokens(part, lesson.objective.packed), len(part))
            for lesson, load, parts in zip(lessons, loads, cuts, strict=True)
            for part in parts
        ]
        self.budget.shrink(max(tokens for tokens, _ in tried), alone=all(units == 1 for _, units in tried))
        return False

    def _accumulate(self, lesson: Lesson, minibatch: Any, load: Load, parts: list[Tensor], first: bool) -> None:
        """The gradient of one minibatch, micro-batch by micro-batch."""
        if not len(minibatch) or not lesson.share:
            return
        weights = lesson.objective.weights(minibatch)
        for rows in parts:
            with self.budget.measured(load.tokens(rows, lesson.objective.packed), self.device):
                lesson.objective.accumulate(minibatch.select(rows), weights[rows], lesson.share, first)

    def _apply(self) -> bool:
        """One update of everything that is trained; whether the policy moved."""
        limit, moved, left_out = self.live.config.max_grad_norm, [], 0
        with self.tracker.span("update/optimizer"):
            for name, engine in self.engines.items():
                skipped = engine.skipped
                norm = engine.step(limit)
                self.tracker.add("train/grad_norm" if name == "policy" else f"train/{name}_grad_norm", norm)
                moved.append(engine.skipped == skipped)
                left_out += engine.skipped - skipped
        self.tracker.add("train/skipped_updates", left_out)
        return moved[0]

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state by engine, and the random state that orders minibatches."""
        engines = {name: engine.state_dict() for name, engine in self.engines.items()}
        return {"engines": engines, "order": self.order.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave.

        Raises:
            CheckpointError: other engines than these, or state that does not fit them.
        """
        if set(state) != {"engines", "order"} or set(state["engines"]) != set(self.engines):
            raise CheckpointError(
                f"a learner's state holds order and the engines {sorted(self.engines)}, got {sorted(state)} with "
                f"{sorted(state.get('engines', ()))}"
            )
        for name, engine in self.engines.items():
            engine.load_state_dict(state["engines"][name])
        self.order.set_state(state["order"])

    def release(self) -> None:
        """Drops optimizer state and gradients."""
        for engine in self.engines.values():
            engine.release()
