"""A trainer: a declared dataflow plus a loss, taken one step at a time."""

from __future__ import annotations

import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from rlkit.batch import RolloutBatch
from rlkit.collate import DataCollector
from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reference import ReferenceController
from rlkit.controllers.reward import RewardController
from rlkit.data import OPENINGS, PromptSource
from rlkit.dataflow import Dataflow
from rlkit.engines.models import context_length
from rlkit.errors import ConfigError, DataError
from rlkit.generation.base import SamplingParams
from rlkit.metrics import MetricsTracker
from rlkit.pipeline import Pipeline
from rlkit.rewards import RewardWeights
from rlkit.runs.protocol import StepResult
from rlkit.schedules import adapt_kl_coef
from rlkit.trainers.assemble import as_rewards, complete, place
from rlkit.trainers.learner import Learner
from rlkit.trainers.measure import measure, reference_kl, rollout_table
from rlkit.trainers.nodes import PolicyScores, RewardMix
from rlkit.trainers.runnable import Runnable

RewardOfStep = Callable[[int], RewardController]


class Trainer(Runnable):
    """What all trainers share: sampling through the dataflow, learning, live settings, state, runs.

    Args:
        actor: the policy to train.
        reward_model: one reward or several: a RewardController, a callable, a dictionary of term name to reward, or a
            list of rewards or `(reward, weight)` pairs.
        critic: the value function, for algorithms that use one.
        reference: the policy the KL penalty is measured against.
        prompts: texts, chats, rows with a "prompt", a `datasets.Dataset`, or a path to JSONL or Parquet; None takes
            rlkit's own short openings.
        config: a TrainerConfig, or a dictionary of its fields over the algorithm's own defaults.
        dataflow: connections of one's own (and controllers of one's own); the trainer adds what is missing.

    Raises:
        ConfigError: an unknown key (the nearest name is suggested), a value out of range, or a combination that cannot
            learn.
        DataError: an empty prompt, or one that does not fit the model's context.
        DataflowError: the controllers do not fit together; names the controller and the field.
        ModelError: critic or reference read other tokens than the actor writes.
    """

    algorithm: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        actor: ActorController,
        reward_model: Any = None,
        *,
        critic: CriticController | None = None,
        reference: ReferenceController | None = None,
        prompts: Any = None,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        dataflow: Dataflow | None = None,
    ) -> None:
        self.config = self.configure(config)
        if self.config.lr is None:
            own = 1e-6 if actor.optimizer is None else float(actor.optimizer.param_groups[0]["lr"])
            self.config = self.config.replace_live({"lr": own})
        if self.config.critic_lr is None and critic is not None and critic.optimizer is not None:
            self.config = self.config.replace_live({"critic_lr": float(critic.optimizer.param_groups[0]["lr"])})
        self.actor, self.critic, self.reference = actor, critic, reference
        self.rewards, weights = as_rewards(reward_model)
        self.weights = RewardWeights(weights)
        if self.config.reward_weights is not None:
            self.weights.set(self.config.reward_weights)
        self.global_step = 0
        self.tracker = MetricsTracker()
        self._user_dataflow = dataflow
        self._reward_of_step: RewardOfStep | None = None
        super().__init__()
        self._threads = self.config.threads or torch.get_num_threads()
        for other in (critic, reference):
            if other is not None:
                other.require_tokenizer_of(actor)
        self._check()
        self.place()
        actor.rng.manual_seed(self.config.seed)
        self.prompts = PromptSource(
            OPENINGS if prompts is None else prompts,
            actor.tokenizer,
            seed=self.config.seed,
            max_prompt_length=self._longest_prompt(),
        )
        self.dataflow = self._assemble()
        self.learner = Learner(self, actor, critic, self.tracker)

    # What an algorithm is made of

    @abstractmethod
    def advantages(self) -> Controller:
        """The controller that turns rewards into advantages."""

    def _check(self) -> None:
        """Refuses what this algorithm cannot learn from."""
        if self.config.kl_coef and self.reference is None:
            raise ConfigError(
                f"kl_coef={self.config.kl_coef} needs a reference to measure the KL against: "
                "reference=ReferenceController(actor)"
            )

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates made in one step."""
        minibatch = self.config.minibatch_size or self.config.batch_size
        return self.config.ppo_epochs * -(-self.config.batch_size // minibatch)

    @property
    def needs_policy_scores(self) -> bool:
        """Whether log-probs before the update must be computed in a forward pass of their own.

        With a single update a step they equal those of that update, and no pass is needed. A critic on the actor's
        trunk gives them in its own pass.
        """
        if self.critic is not None and self.critic.trunk is not None:
            return False
        return self.updates_per_step > 1 or self.penalises_reward

    @property
    def penalises_reward(self) -> bool:
        """Whether the KL penalty, if any, is part of the reward."""
        return self.reference is not None and self.config.kl_placement == "reward"

    # Steps

    def step(self) -> StepResult:
        """One optimizer iteration: sample, score, learn.

        If sampling or scoring fails or is interrupted, prompts and random state are put back, so that the same step
        can be taken again.

        Raises:
            RunError: a background run owns this trainer's state.
        """
        self.require_own_state()
        try:
            return self._step()
        except BaseException as error:
            # A notebook keeps the last exception; its frames must not keep the step's tensors alive.
            traceback.clear_frames(error.__traceback__)
            raise

    def _step(self) -> StepResult:
        started = time.perf_counter()
        self._follow_settings()
        before = (self.prompts.state_dict(), self.actor.rng.get_state())
        try:
            with self.tracker.span("rollout"):
                batch = self.pipeline.run(self._draw())
        except BaseException:
            self.prompts.load_state_dict(before[0])
            self.actor.rng.set_state(before[1])
            self.tracker.flush(self.global_step)
            raise
        sampled = time.perf_counter()
        with self.tracker.span("update"):
            self.learner.learn(batch, self.global_step)
        self.global_step += 1
        measure(self, batch)
        self._adapt(batch)
        self.tracker.add("train/update_time_ms", 1e3 * (time.perf_counter() - sampled))
        self.tracker.add("train/step_time_ms", 1e3 * (time.perf_counter() - started))
        reduced = self.tracker.flush(self.global_step)
        return StepResult(self.global_step, reduced.metrics, reduced.spans, rollout_table(batch))

    def evaluate(self, prompts: Any = None, *, count: int | None = None) -> RolloutBatch:
        """Samples and scores without learning; leaves prompts, random state and weights as they were.

        Args:
            prompts: as for the trainer; None takes the trainer's own, from where it stands.
            count: prompts to draw; None takes `prompts_per_step`.
        """
        self.require_own_state()
        self._follow_settings()
        source = self.prompts
        if prompts is not None:
            source = PromptSource(prompts, self.actor.tokenizer, seed=0, max_prompt_length=self._longest_prompt())
        before = (source.state_dict(), self.actor.rng.get_state())
        try:
            return self.pipeline.run(self._draw(source, count))
        finally:
            source.load_state_dict(before[0])
            self.actor.rng.set_state(before[1])
            self.tracker.flush(self.global_step)

    def _draw(self, source: PromptSource | None = None, count: int | None = None) -> RolloutBatch:
        """The next prompts, each repeated `group_size` times, on the actor's device."""
        rows = (source or self.prompts).next(count or self.config.prompts_per_step)
        batch = RolloutBatch(
            {
                **DataCollector(self.actor.pad_token_id).collate_prompts([row.ids for row in rows]),
                "prompts": [row.text for row in rows],
                "columns": [row.columns for row in rows],
                "rows": torch.tensor([row.index for row in rows]),
                "groups": torch.arange(len(rows)),
            }
        )
        return batch.select(torch.arange(len(rows)).repeat_interleave(self.config.group_size)).to(self.actor.device)

    def _follow_settings(self) -> None:
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
        for other in (self.critic, self.reference):
            if other is not None:
                other.temperature = config.temperature
        if self._reward_of_step is not None:
            self._take_rewards([self._reward_of_step(self.global_step)])

    def _adapt(self, batch: RolloutBatch) -> None:
        """Moves an adaptive KL coefficient towards its target."""
        if self.config.kl_target is None or self.reference is None:
            return
        kl = float(reference_kl(batch).sum()) / batch.batch_size
        coef = adapt_kl_coef(self.config.kl_coef, kl, self.config.kl_target, self.config.kl_horizon, batch.batch_size)
        self.config = self.config.replace_live({"kl_coef": coef})

    # Rewards

    def set_reward_controller(self, reward: RewardController | RewardOfStep) -> None:
        """Makes one reward the only one, from the next step on.

        Args:
            reward: a RewardController, or a function of the step that returns one.
        """
        if isinstance(reward, RewardController):
            self._reward_of_step = None
            self._take_rewards([reward])
        elif callable(reward):
            self._reward_of_step = reward
            self._take_rewards([reward(self.global_step)])
        else:
            raise ConfigError(f"expected a RewardController or a function of the step, got {type(reward).__name__}")

    def set_multi_reward_controllers(self, rewards: list[tuple[RewardController, float]]) -> None:
        """Replaces all rewards by these, with their weights, from the next step on."""
        controllers, weights = as_rewards(rewards)
        self._reward_of_step = None
        self._take_rewards(controllers, weights)

    def _take_rewards(self, rewards: list[RewardController], weights: Mapping[str, float] | None = None) -> None:
        if weights is None and [id(r) for r in rewards] == [id(r) for r in self.rewards]:
            return
        before = (self.rewards, self.weights)
        known = self.weights.current
        self.rewards = rewards
        self.weights = RewardWeights(weights or {r.name: known.get(r.name, 1.0) for r in rewards})
        try:
            self.place()
            self.dataflow = self._assemble()
        except BaseException:
            self.rewards, self.weights = before
            raise

    # Live settings

    def settings(self) -> dict[str, Any]:
        """Live settings and the values in force; `reward_weights` holds one weight a term."""
        live = {name: getattr(self.config, name) for name in TrainerConfig.live_fields()}
        return {**live, "reward_weights": self.weights.current}

    def setting_specs(self) -> dict[str, dict[str, Any]]:
        """For each live setting its type, bounds and description."""
        return {
            **TrainerConfig.live_specs(),
            "reward_weights": {
                "type": "weights",
                "min": None,
                "max": None,
                "doc": "Weight of each reward term in the reward that is optimised.",
            },
        }

    def set(self, **changes: Any) -> None:
        """Changes live settings from the next step on; all of them or none.

        Raises:
            ConfigError: a name is unknown or fixed, a value is out of range, or a weight names no term.
        """
        if not changes:
            raise ConfigError(f"nothing to set; live settings are {', '.join(self.settings())}")
        weights = changes.pop("reward_weights", None)
        config = self.config.replace_live(changes)
        if config.kl_coef and self.reference is None:
            raise ConfigError("kl_coef needs a reference, and this trainer has none")
        if weights is not None:
            self.weights.set(weights)
        self.config = config

    # Graph and placement

    @classmethod
    def configure(cls, config: TrainerConfig | Mapping[str, Any] | None) -> TrainerConfig:
        """The settings over the algorithm's own defaults."""
        if isinstance(config, TrainerConfig):
            return config
        return TrainerConfig.from_dict({**cls.defaults, **(config or {})})

    def _longest_prompt(self) -> int:
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

    def place(self) -> None:
        """Moves every controller to its device."""
        others = [c for c in (self.critic, self.reference, *self.rewards) if c is not None]
        place(self.config, self.actor, others)

    def _assemble(self) -> Dataflow:
        scorer = PolicyScores(self.actor, self) if self.needs_policy_scores else None
        dataflow = complete(
            self._user_dataflow,
            self.actor,
            self.rewards,
            self.critic,
            self.reference,
            RewardMix([reward.name for reward in self.rewards], self.weights),
            scorer,
            self.advantages(),
        )
        self.pipeline = Pipeline(dataflow, self.tracker)
        return dataflow
