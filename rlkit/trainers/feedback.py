"""Reward models that learn: which of them feedback leads to, what they learn from, and their loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.controllers.base import field_names
from rlkit.controllers.parts import narrowed
from rlkit.controllers.reward import RewardController
from rlkit.dataflow import Dataflow
from rlkit.engines.train import Group, TrainEngine
from rlkit.metrics import MetricsTracker
from rlkit.trainers.learner import Lesson


def feedback_shares(dataflow: Dataflow | None, rewards: Sequence[RewardController]) -> dict[RewardController, float]:
    """Reward models that an edge of the user's dataflow leads feedback to, and the weight of the edge."""
    edges = () if dataflow is None else dataflow.edges
    into = {edge.target: edge for edge in edges if edge.kind == "feedback"}
    return {
        reward: 1.0 if (weight := into[reward].weight) is None else weight
        for reward in rewards
        if reward in into and reward.model is not None
    }


def let_learn(dataflow: Dataflow | None, rewards: Sequence[RewardController]) -> None:
    """Tells each of these reward models what it learns from: `reward_targets` where a giver writes them, or values."""
    for reward in feedback_shares(dataflow, rewards):
        assert dataflow is not None
        givers = [edge.source for edge in dataflow.feedback_into(reward)]
        targets = any("reward_targets" in field_names(giver, giver.writes, "writes") for giver in givers)
        reward.learn_from_feedback("reward_targets" if targets else "values")


def feedback_engines(rewards: Sequence[RewardController], config: TrainerConfig) -> dict[str, TrainEngine]:
    """An engine for each reward model that learns."""
    engines = {}
    for reward in rewards:
        assert reward.model is not None
        group = Group(engine_name(reward), reward.model, role="reward")
        engines[group.name] = TrainEngine([group], config.weight_decay, config.max_bad_steps)
    return engines


def feedback_lessons(
    batch: RolloutBatch,
    shares: Mapping[RewardController, float],
    engines: Mapping[str, TrainEngine],
    tracker: MetricsTracker,
) -> list[Lesson]:
    """What reward models learn from a batch, each by its share."""
    return [
        Lesson(FeedbackObjective(reward, engines[engine_name(reward)], tracker), batch, share)
        for reward, share in shares.items()
    ]


def engine_name(reward: RewardController) -> str:
    """Name of a reward model's engine."""
    return f"reward_{reward.name}"


class FeedbackObjective:
    """Fine-tunes a reward model towards what a critic, or a controller of one's own, says of its responses.

    The loss of a response is `(score - target)^2 / 2`, where the target is the critic's value before the last token,
    its estimate of the reward to come, or `reward_targets` where the batch holds them. Weighed lightly, it makes the
    model agree with what returns have shown, and smooths the reward; alone it would forget what it was trained on.

    Args:
        reward: a reward controller with a model.
        engine: takes its gradients.
        tracker: takes the metrics.
    """

    def __init__(self, reward: RewardController, engine: TrainEngine, tracker: MetricsTracker) -> None:
        self.reward, self.engine, self.tracker = reward, engine, tracker

    packed = False

    def needed(self, minibatch: RolloutBatch) -> RolloutBatch:
        return narrowed(minibatch, self._counted(minibatch))

    def weights(self, minibatch: RolloutBatch) -> Tensor:
        """(B,): every response with a token and a reward counts the same."""
        counted = self._counted(minibatch).float()
        return counted / counted.sum().clamp_min(1)

    def accumulate(self, part: RolloutBatch, weights: Tensor, share: float, first: bool) -> None:
        with self.tracker.span("update/reward"):
            scores = self.reward.differentiable_scores(part)
            loss = 0.5 * (scores - self._targets(part).to(scores)).square()
            self.engine.backward(share * (loss * weights.to(loss)).sum())
        counted = weights > 0
        name = f"feedback/{self.reward.name}_loss"
        self.tracker.add_sum_count(name, loss.detach()[counted.to(loss.device)].sum(), counted.sum())

    def _counted(self, batch: RolloutBatch) -> Tensor:
        counted: Tensor = batch.reward_valid & batch.response_mask.any(1)
        return counted

    def _targets(self, part: RolloutBatch) -> Tensor:
        if self.reward.learns_from == ("reward_targets",):
            targets: Tensor = part.reward_targets
            return targets
        last = (part.response_lengths - 1).clamp_min(0).unsqueeze(1)
        values: Tensor = part.values
        return values.gather(1, last).squeeze(1)
