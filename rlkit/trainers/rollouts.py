"""Trainers that learn from responses they sample: a declared dataflow plus a loss."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller
from rlkit.controllers.critic import CriticController
from rlkit.controllers.hosted import HostedController
from rlkit.controllers.reference import ReferenceController
from rlkit.controllers.reward import RewardController
from rlkit.curriculum import CurriculumSource
from rlkit.data import PromptSource
from rlkit.dataflow import Dataflow
from rlkit.engines.train import TrainEngine
from rlkit.errors import ConfigError
from rlkit.generation.base import Generator
from rlkit.generation.choice import generator_for
from rlkit.pipeline import Pipeline
from rlkit.rewards import RewardWeights
from rlkit.schedules import adapt_kl_coef
from rlkit.trainers.aspects import rollout_aspects
from rlkit.trainers.assemble import complete, normalization_of
from rlkit.trainers.base import LivePart, Trainer, new_learner
from rlkit.trainers.feedback import feedback_engines, feedback_lessons, feedback_shares, let_learn
from rlkit.trainers.filling import fill, require_sampled
from rlkit.trainers.learner import Lesson
from rlkit.trainers.measure import measure, reference_kl, rollout_table
from rlkit.trainers.nodes import GreedyBaseline, PolicyScores, RewardMix, RolloutCorrection
from rlkit.trainers.objectives import PolicyObjective
from rlkit.trainers.prompts import draw_prompts, open_prompts
from rlkit.trainers.runnable import Stateful
from rlkit.trainers.terms import RewardOfStep, RewardTerms


class RolloutTrainer(Trainer):
    """What trainers on sampled responses share: sampling through the dataflow, rewards, evaluation.

    Args:
        actor: the policy to train.
        reward_model: one reward or several: a RewardController, a callable, a dictionary of term name to reward, or a
            list of rewards or `(reward, weight)` pairs.
        critic: the value function, for algorithms that use one.
        reference: the policy the KL penalty is measured against.
        prompts: texts, chats, rows with a "prompt", a `datasets.Dataset`, a path to JSONL or Parquet, or a
            `Curriculum`; None takes rlkit's own short openings.
        config: a TrainerConfig, or a dictionary of its fields over the algorithm's own defaults.
        dataflow: connections of one's own (and controllers of one's own); the trainer adds what is missing.

    Raises:
        ConfigError: an unknown key (the nearest name is suggested), a value out of range, or a combination that cannot
            learn.
        DataError: an empty prompt, or one that does not fit the model's context.
        DataflowError: the controllers do not fit together; names the controller and the field.
        ModelError: critic or reference read other tokens than the actor writes.
    """

    actor_learns_from: ClassVar[tuple[str, ...]] = ("advantages",)

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
        super().__init__(actor, critic=critic, reference=reference, config=config)
        self.terms = RewardTerms(reward_model, self.config.reward_weights)
        self._user_dataflow = dataflow
        self.prompts = self._open(prompts, self.config.seed)
        self.terms.follow(0, self._stage_rewards)
        self.place()
        actor.generator = self._generator()
        actor.learns_from = self.actor_learns_from
        if critic is not None:
            critic.bootstraps = self.config.bootstrap_truncated
        self.dataflow = self._assemble()
        self.learner = new_learner(self)

    # What an algorithm is made of

    @abstractmethod
    def estimator(self) -> Controller:
        """The controller that turns rewards into what the actor learns from."""

    def lessons(self, batch: RolloutBatch) -> list[Lesson]:
        """What is learned from a batch of rollouts."""
        feedback = feedback_lessons(batch, self._learning, self.learner.engines, self.tracker)
        return [Lesson(self.policy_objective(), batch), *feedback]

    @property
    def _learning(self) -> dict[RewardController, float]:
        """Reward models that learn, and the share they take of the feedback."""
        return feedback_shares(self._user_dataflow, self.rewards)

    def engines(self) -> dict[str, TrainEngine]:
        return {**super().engines(), **feedback_engines(list(self._learning), self.config)}

    def policy_objective(self) -> PolicyObjective:
        """The policy loss, with the value loss of the critic if there is one."""
        engines = self.learner.engines
        return PolicyObjective(self, self.actor, self.critic, engines["policy"], engines.get("critic"), self.tracker)

    def check(self) -> None:
        self.check_settings(self.config)

    def check_settings(self, config: TrainerConfig) -> None:
        if config.kl_coef and self.reference is None:
            raise ConfigError(
                f"kl_coef={config.kl_coef} needs a reference to measure the KL against, and this trainer has none: "
                "reference=ReferenceController(actor)"
            )

    @property
    def rewards(self) -> list[RewardController]:
        """The reward terms in force."""
        return self.terms.controllers

    @property
    def weights(self) -> RewardWeights:
        """Their weights."""
        return self.terms.weights

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
        return self.updates_per_step > 1 or self.penalises_reward or self.corrects

    @property
    def penalises_reward(self) -> bool:
        """Whether the KL penalty, if any, is part of the reward."""
        return self.reference is not None and self.config.kl_placement == "reward"

    @property
    def corrects(self) -> bool:
        """Whether differences between trainer and sampler are corrected or rejected."""
        return self.config.correction_weights != "none" or self.config.rejection != "none"

    def hosted(self) -> list[HostedController]:
        others = (self.critic, self.reference, *self.rewards)
        return [self.actor, *(controller for controller in others if controller is not None)]

    def parts(self) -> dict[str, Stateful]:
        return {"prompts": self.prompts, "reward_weights": self.terms, "learner": self.learner}

    def aspects(self) -> set[str]:
        feedback = {"feedback"} if self._learning else set()
        return super().aspects() | rollout_aspects(self.config, self.critic is not None) | feedback

    def live_parts(self) -> dict[str, LivePart]:
        curriculum = {"curriculum": self.prompts} if isinstance(self.prompts, CurriculumSource) else {}
        return {"reward_weights": self.weights, **curriculum}

    def sources(self) -> Sequence[Stateful]:
        return [self.prompts]

    # Steps

    def gather(self) -> tuple[RolloutBatch, list[Lesson]]:
        with self.tracker.span("rollout"):
            batch = fill(self) if self.config.dynamic_sampling else self.pipeline.run(self.draw())
        require_sampled(batch, self.config)
        return batch, self.lessons(batch)

    def measure(self, batch: RolloutBatch) -> None:
        measure(self, batch)

    def table(self, batch: RolloutBatch) -> dict[str, list[Any]]:
        return rollout_table(batch)

    def after(self, batch: RolloutBatch, metrics: Mapping[str, float]) -> None:
        """Moves an adaptive KL coefficient towards its target, and tells the curriculum what came of the step."""
        config = self.config
        if config.kl_target is not None and self.reference is not None:
            kl = float(reference_kl(batch).sum()) / int(batch.drawn_at_random.sum())
            coef = adapt_kl_coef(config.kl_coef, kl, config.kl_target, config.kl_horizon, batch.batch_size)
            self.config = config.replace_live({"kl_coef": coef})

        rewards = batch.rewards.masked_fill(~batch.reward_valid, math.nan)
        if isinstance(self.prompts, CurriculumSource):
            self.prompts.observe(self.global_step, metrics, batch.rows.tolist(), rewards.tolist())
            self.settle()

    def follow_settings(self) -> None:
        super().follow_settings()
        self.settle()

    def let_go(self) -> None:
        self.actor.generator.release()
        for reward in self.rewards:
            reward.close()

    def settle(self) -> None:
        """Takes the rewards of the step and of the curriculum's stage."""
        before = self.terms.copy()
        if self.terms.follow(self.global_step, self._stage_rewards):
            self._reassemble(before)

    def evaluate(self, prompts: Any = None, *, count: int | None = None) -> RolloutBatch:
        """Samples and scores without learning; leaves prompts, random state and weights as they were.

        Args:
            prompts: as for the trainer; None takes the trainer's own, from where it stands.
            count: prompts to draw; None takes `prompts_per_step`.
        """
        self.require_own_state()
        self.follow_settings()
        source = self.prompts if prompts is None else self._open(prompts, seed=0)
        before = (source.state_dict(), self.actor.rng.get_state())
        try:
            return self.pipeline.run(self.draw(source, count))
        finally:
            source.load_state_dict(before[0])
            self.actor.rng.set_state(before[1])
            self.tracker.flush(self.global_step)

    def _generator(self) -> Generator:
        """What samples the actor's responses."""
        actor, context = self.actor, self.longest_prompt() + self.config.max_new_tokens
        return generator_for(self.config, actor.generator, actor.model, actor.pad_token_id, context)

    def _open(self, prompts: Any, seed: int) -> PromptSource | CurriculumSource:
        return open_prompts(prompts, self.actor, seed, self.longest_prompt())

    @property
    def _stage_rewards(self) -> Any:
        """Rewards of the curriculum's stage; None where it has none of its own."""
        return self.prompts.stage_rewards if isinstance(self.prompts, CurriculumSource) else None

    def draw(self, source: PromptSource | CurriculumSource | None = None, count: int | None = None) -> RolloutBatch:
        """The next prompts, each repeated `group_size` times, on the actor's device."""
        count = count or self.config.prompts_per_step
        return draw_prompts(source or self.prompts, count, self.config.group_size, self.actor)

    # Rewards

    def set_reward_controller(self, reward: RewardController | RewardOfStep) -> None:
        """Makes one reward the only one, from the next step on.

        Args:
            reward: a RewardController, or a function of the step that returns one.
        """
        before = self.terms.copy()
        self.terms.use(reward, self.global_step)
        self._reassemble(before)

    def set_multi_reward_controllers(self, rewards: list[tuple[RewardController, float]]) -> None:
        """Replaces all rewards by these, with their weights, from the next step on."""
        before = self.terms.copy()
        self.terms.use_all(rewards)
        self._reassemble(before)

    def _reassemble(self, before: RewardTerms) -> None:
        """Puts other terms into the dataflow; puts those before back where they do not fit."""
        try:
            self.place()
            self.dataflow = self._assemble()
        except BaseException:
            self.terms.restore(before)
            raise
        for reward in before.controllers:
            if reward not in self.rewards:
                reward.close()
        fresh = self.engines()
        self.learner.engines = {name: self.learner.engines.get(name, engine) for name, engine in fresh.items()}

    def setting_specs(self) -> dict[str, dict[str, Any]]:
        """For each live setting its type, bounds and description."""
        parts = {
            "reward_weights": ("weights", "Weight of each reward term in the reward that is optimised."),
            "curriculum": ("curriculum", "Stage, mixture and thresholds of the curriculum."),
        }
        specs = {name: {"type": kind, "min": None, "max": None, "doc": doc} for name, (kind, doc) in parts.items()}
        return {**TrainerConfig.live_specs(self.aspects()), **{name: specs[name] for name in self.live_parts()}}

    def describe(self) -> dict[str, Any]:
        """What was asked for, as plain values, for the run folder."""
        declared = {"curriculum": self.prompts.describe()} if isinstance(self.prompts, CurriculumSource) else {}
        return {**super().describe(), "reward_terms": self.terms.names, **declared}

    # Graph

    def _assemble(self) -> Dataflow:
        terms = self.terms.names
        let_learn(self._user_dataflow, self.rewards)
        self.mixer = RewardMix(terms, self.weights, normalization_of(self.config, terms))
        self.last = self.estimator()
        scorers: list[Controller] = [self.reference] if self.reference is not None else []
        if self.needs_policy_scores:
            scorers.append(PolicyScores(self.actor, self))
        if self.config.advantage_estimator == "remax" and self.critic is None:
            scorers.append(GreedyBaseline(self.actor, self.rewards, self.mixer, self))
        dataflow = complete(
            self._user_dataflow,
            self.actor,
            self.rewards,
            [self.critic] if self.critic is not None else [],
            scorers,
            self.mixer,
            RolloutCorrection(self, self.tracker) if self.corrects else None,
            self.last,
        )
        self.pipeline = Pipeline(dataflow, self.tracker)
        return dataflow
