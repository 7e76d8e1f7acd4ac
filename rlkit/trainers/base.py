"""What all trainers share: one step at a time, live settings, placement."""

from __future__ import annotations

import copy
import time
import traceback
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.controllers.hosted import HostedController
from rlkit.controllers.reference import ReferenceController
from rlkit.engines.models import context_length
from rlkit.engines.train import Group, TrainEngine
from rlkit.errors import ConfigError, DataError
from rlkit.generation.base import SamplingParams
from rlkit.metrics import MetricsTracker, telemetry
from rlkit.runs.protocol import StepResult
from rlkit.trainers.assemble import adaptive_sampling, place
from rlkit.trainers.learner import Learner, Lesson
from rlkit.trainers.runnable import Runnable, Stateful
from rlkit.trainers.state import require_memory


class LivePart(Stateful, Protocol):
    """A part of a trainer with live settings of its own, under one name among the trainer's."""

    def settings(self) -> dict[str, Any]: ...
    def set(self, changes: Mapping[str, Any], /) -> None: ...


class Trainer(Runnable):
    """One optimizer iteration at a time: gather a batch, learn from it, report.

    Args:
        actor: the policy to train.
        critic: the value function, for algorithms that use one.
        reference: the policy that holds the actor near it.
        config: a TrainerConfig, or a dictionary of its fields over the algorithm's own defaults.

    Raises:
        ConfigError: an unknown key (the nearest name is suggested), a value out of range, or a combination that cannot
            learn.
        ModelError: critic or reference read other tokens than the actor writes.
        RunError: a run owns the weights of one of them.
    """

    algorithm: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        actor: ActorController,
        *,
        critic: CriticController | None = None,
        reference: ReferenceController | None = None,
        config: TrainerConfig | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        for controller in (actor, critic, reference):
            if controller is not None:
                require_memory(controller)
        self.config = self.configure(config)
        if self.config.lr is None:
            own = 1e-6 if actor.optimizer is None else float(actor.optimizer.param_groups[0]["lr"])
            self.config = self.config.replace_live({"lr": own})
        if self.config.critic_lr is None and critic is not None and critic.optimizer is not None:
            self.config = self.config.replace_live({"critic_lr": float(critic.optimizer.param_groups[0]["lr"])})
        self.actor, self.critic, self.reference = actor, critic, reference
        self.global_step = 0
        self.tracker = MetricsTracker()
        self._stepping = False
        self._deferred: list[dict[str, Any]] = []
        self._threads = self.config.threads or torch.get_num_threads()
        for other in (critic, reference):
            if other is not None:
                other.require_tokenizer_of(actor)
        self.check()
        actor.rng.manual_seed(self.config.seed)

    # What an algorithm is made of

    @abstractmethod
    def gather(self) -> tuple[RolloutBatch, list[Lesson]]:
        """The step's batch, scored, and what is learned from it. Changes nothing but `sources` and random state."""

    @abstractmethod
    def sources(self) -> Sequence[Stateful]:
        """Where `gather` draws from; put back when it fails."""

    @abstractmethod
    def measure(self, batch: RolloutBatch) -> None:
        """Adds the batch's metrics to the tracker."""

    @abstractmethod
    def table(self, batch: RolloutBatch) -> dict[str, list[Any]]:
        """Columns of the run folder's rollout table."""

    @abstractmethod
    def hosted(self) -> list[HostedController]:
        """The controllers that keep models, the actor first."""

    def check(self) -> None:
        """Refuses what this algorithm cannot learn from."""

    def after(self, batch: RolloutBatch, metrics: Mapping[str, float]) -> None:
        """Called at the end of a step with its metrics."""

    def aspects(self) -> set[str]:
        """What of `TrainerConfig`'s live settings means something to this trainer, see `rlkit.config_fields.live`."""
        return {"critic"} if self.critic is not None else set()

    def live_parts(self) -> dict[str, LivePart]:
        """Parts with live settings of their own, by the name of the setting."""
        return {}

    # Steps

    def step(self) -> StepResult:
        """One optimizer iteration.

        If gathering the batch fails or is interrupted, data and random state are put back, so that the same step can
        be taken again.

        Raises:
            RunError: a background run owns this trainer's state.
        """
        self.require_own_state()
        self._stepping = True
        try:
            return self._step()
        except BaseException as error:
            # A notebook keeps the last exception; its frames must not keep the step's tensors alive.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            self._stepping = False
            while self._deferred:
                self.set(**self._deferred.pop(0))

    def _step(self) -> StepResult:
        started = time.perf_counter()
        self.follow_settings()
        before = ([source.state_dict() for source in self.sources()], self.actor.rng.get_state())
        try:
            batch, lessons = self.gather()
        except BaseException:
            for source, state in zip(self.sources(), before[0], strict=True):
                source.load_state_dict(state)
            self.actor.rng.set_state(before[1])
            self.tracker.flush(self.global_step)
            raise
        gathered = time.perf_counter()
        self.actor.generator.sleep()
        with self.tracker.span("update"):
            self.actor.policy_version += self.learner.learn(lessons, self.global_step)
        self.global_step += 1
        self.measure(batch)
        for name, value in telemetry.memory(self._devices()).items():
            self.tracker.add(name, value)
        self.tracker.add("train/update_time_ms", 1e3 * (time.perf_counter() - gathered))
        self.tracker.add("train/step_time_ms", 1e3 * (time.perf_counter() - started))
        reduced = self.tracker.flush(self.global_step)
        self.after(batch, reduced.metrics)
        return StepResult(self.global_step, reduced.metrics, reduced.spans, self.table(batch))

    def follow_settings(self) -> None:
        """Hands the settings in force to those who act on them, in whichever process this is."""
        config = self.config
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        self.actor.sampling = SamplingParams(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=self.actor.stop_token_ids,
        )
        self.actor.adaptive = adaptive_sampling(config, self.actor.sampling)
        for other in (self.critic, self.reference):
            if other is not None:
                other.temperature = config.temperature

    # Live settings

    def settings(self) -> dict[str, Any]:
        """Live settings and the values in force, those of parts under the part's name."""
        live = {name: getattr(self.config, name) for name in TrainerConfig.live_fields(self.aspects())}
        return {**live, **{name: part.settings() for name, part in self.live_parts().items()}}

    def set(self, **changes: Any) -> None:
        """Changes live settings from the next step on; all of them or none.

        A change made while a step is running, by a reward function or another thread, waits for its end: a step has
        the same settings from its first prompt to its last update.

        Raises:
            ConfigError: a name is unknown or fixed, a value is out of range, or a part refuses its change.
        """
        if not changes:
            raise ConfigError(f"nothing to set; live settings are {', '.join(self.settings())}")
        self._require_meaning(changes)
        parts = {name: part for name, part in self.live_parts().items() if name in changes}
        config = self.config.replace_live({name: value for name, value in changes.items() if name not in parts})
        self.check_settings(config)
        if self._stepping:
            for name, part in parts.items():
                copy.deepcopy(part).set(changes[name])
            self._deferred.append(changes)
            return
        before = {name: part.state_dict() for name, part in parts.items()}
        try:
            for name, part in parts.items():
                part.set(changes[name])
            self.settle()
        except BaseException:
            for name, part in parts.items():
                part.load_state_dict(before[name])
            raise
        self.config = config

    def _require_meaning(self, changes: Mapping[str, Any]) -> None:
        """Refuses settings of another algorithm, which would be changed to no effect."""
        idle = set(TrainerConfig.live_fields()) - set(TrainerConfig.live_fields(self.aspects()))
        if unused := sorted(idle & set(changes)):
            raise ConfigError(
                f"{', '.join(unused)} means nothing to this {type(self).__name__} as it is configured; live settings "
                f"are {', '.join(self.settings())}"
            )

    def check_settings(self, config: TrainerConfig) -> None:
        """Refuses settings that this trainer cannot follow."""

    # Placement and engines

    @classmethod
    def configure(cls, config: TrainerConfig | Mapping[str, Any] | None) -> TrainerConfig:
        """The settings over the algorithm's own defaults."""
        if isinstance(config, TrainerConfig):
            return config
        return TrainerConfig.from_dict({**cls.defaults, **(config or {})})

    def place(self) -> None:
        """Moves every controller to its device."""
        place(self.config, self.actor, [controller for controller in self.hosted() if controller is not self.actor])

    def engines(self) -> dict[str, TrainEngine]:
        """What is trained, "policy" first: a critic on the actor's trunk together with it, one of its own beside it."""
        config, critic = self.config, self.critic
        groups = {"policy": [Group("actor", self.actor.model, self.actor.optimizer)]}
        if critic is not None:
            shared = critic.trunk is not None
            groups.setdefault("policy" if shared else "critic", []).append(
                Group("critic", critic.trained_module, critic.optimizer)
            )
        return {name: TrainEngine(held, config.weight_decay, config.max_bad_steps) for name, held in groups.items()}

    def longest_prompt(self) -> int:
        """Tokens that a prompt may have: what the model's context leaves beside a response, or the configured limit."""
        context = context_length(self.actor.model)
        room = None if context is None else context - self.config.max_new_tokens
        if room is not None and room < 1:
            raise ConfigError(
                f"max_new_tokens={self.config.max_new_tokens} leaves no room for a prompt in the model's context of "
                f"{context} tokens"
            )
        limits = [limit for limit in (room, self.config.max_prompt_length) if limit is not None]
        if not limits:
            raise DataError("the model does not say how long its context is; set max_prompt_length")
        return min(limits)

    def _devices(self) -> dict[str, str]:
        """Device of each role that keeps a model."""
        return {controller.role: controller.device for controller in self.hosted() if controller.modules()}


def new_learner(trainer: Trainer) -> Learner:
    """The learner of a trainer whose controllers are placed."""
    return Learner(trainer, trainer.engines(), trainer.tracker, lambda: trainer.actor.generator.spare())
