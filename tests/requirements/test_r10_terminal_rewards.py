"""R10: the reward sits on the last sampled token, value t is the state before it, and being cut off is not an end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlkit.algorithms.advantages import gae, place_rewards
from rlkit.batch import RolloutBatch
from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.trainers.estimators import GaeAdvantages
from tests.batches import COLLECTOR
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.toys import ppo

VALUES = torch.tensor([[0.5, 0.6, 0.7]])
ONES = torch.ones(1, 3)


def _close(given: Tensor, wanted: object) -> None:
    torch.testing.assert_close(given, torch.tensor(wanted), atol=1e-4, rtol=0)


def rollouts() -> RolloutBatch:
    return RolloutBatch(COLLECTOR.collate([[5, 6], [7, 8, 9]], [[7, 8, 2], [10, 2]]))


def test_r10_a_critic_on_the_actors_trunk_gives_values_of_the_states_before_each_token() -> None:
    actor = ActorController(tiny_model(), tiny_tokenizer())
    critic = CriticController(trunk=actor)
    torch.nn.init.normal_(critic.head.linear.weight)
    fields = critic.run(rollouts())
    hidden = actor.model.model(torch.tensor([[7, 8, 9, 10]])).last_hidden_state[0]
    assert torch.allclose(fields["values"][1, :2], critic.head(hidden)[2:4], atol=1e-5)
    assert set(fields) == {"values", "logprobs"}
    assert float(fields["values"][1, 2]) == pytest.approx(critic.head.linear.bias.item())
    own = CriticController(tiny_model())
    own.head.load_state_dict(critic.head.state_dict())
    assert torch.allclose(own.run(rollouts())["values"][0], fields["values"][0], atol=1e-5)


def test_r10_terminated_with_lambda_1() -> None:
    advantages, returns = gae(torch.tensor([[0.0, 0.0, 1.0]]), VALUES, ONES, 1.0, 1.0)
    _close(advantages, [[0.5, 0.4, 0.3]])
    _close(returns, [[1.0, 1.0, 1.0]])


def test_r10_terminated_with_lambda_095() -> None:
    advantages, returns = gae(torch.tensor([[0.0, 0.0, 1.0]]), VALUES, ONES, 1.0, 0.95)
    _close(advantages, [[0.46575, 0.3850, 0.3000]])
    _close(returns, [[0.96575, 0.9850, 1.0]])


def test_r10_truncated_with_and_without_bootstrap() -> None:
    rewards = torch.zeros(2, 3)
    advantages, _ = gae(rewards, VALUES.expand(2, 3), ONES.expand(2, 3), 1.0, 0.95, bootstrap=torch.tensor([0.8, 0.0]))
    _close(advantages, [[0.28525, 0.1950, 0.1000], [-0.43675, -0.5650, -0.7]])


def test_r10_padding_changes_nothing() -> None:
    pad = torch.nn.functional.pad
    rewards, bootstrap = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([0.8])
    plain = gae(rewards, VALUES, ONES, 0.9, 0.95, bootstrap)
    for left, right in ((0, 5), (5, 0), (2, 3)):
        wide = gae(
            pad(rewards, (left, right), value=7.0),
            pad(VALUES, (left, right), value=float("nan")),
            pad(ONES, (left, right)),
            0.9,
            0.95,
            bootstrap,
        )
        for narrow, padded in zip(plain, wide, strict=True):
            assert torch.equal(pad(narrow, (left, right)), padded)


def test_r10_the_reward_sits_on_the_last_sampled_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]])
    placed = place_rewards(torch.tensor([2.0, 3.0, 4.0, 5.0]), mask)
    assert placed.tolist() == [[0, 2, 0, 0], [0, 0, 0, 3], [0, 0, 0, 4], [0, 0, 0, 0]]


@pytest.mark.parametrize("pads", [0, 2])
@pytest.mark.parametrize(
    ("reason", "reward", "bootstraps", "lam", "wanted"),
    [
        ("stop", 1.0, True, 1.0, [0.5, 0.4, 0.3]),
        ("stop", 1.0, True, 0.95, [0.4658, 0.3850, 0.3000]),
        ("length", 0.0, True, 0.95, [0.2853, 0.1950, 0.1000]),
        ("length", 0.0, False, 0.95, [-0.4367, -0.5650, -0.7]),
        ("stop", 0.0, True, 0.95, [-0.4367, -0.5650, -0.7]),
    ],
)
def test_r10_the_trainers_advantages(
    reason: str, reward: float, bootstraps: bool, lam: float, wanted: list[float], pads: int
) -> None:
    """Only a response cut off at the limit goes on to the critic's value of its end, and only if that is asked for."""
    trainer = ppo(lam=lam, bootstrap_truncated=bootstraps, whiten_advantages=False)
    fields = {
        "values": torch.nn.functional.pad(VALUES, (0, pads), value=9.0),
        "response_mask": torch.nn.functional.pad(ONES, (0, pads)).bool(),
        "rewards": torch.tensor([reward]),
        "reward_valid": torch.tensor([True]),
        "bootstrap_values": torch.tensor([0.8]),
        "finish_reasons": [reason],
    }
    given = GaeAdvantages(trainer).run(RolloutBatch(fields))
    _close(given["advantages"], [[*wanted, *[0.0] * pads]])
    _close(given["returns"][:, :3], [[a + v for a, v in zip(wanted, VALUES[0].tolist(), strict=True)]])
    assert given["token_rewards"].tolist() == [[0.0, 0.0, reward, *[0.0] * pads]]


def test_r10_the_value_of_the_end_is_that_of_the_state_after_the_last_token() -> None:
    critic = CriticController(tiny_model(initializer_range=0.2))
    torch.nn.init.normal_(critic.head.linear.weight)
    critic.bootstraps = True
    fields = critic.run(rollouts())
    with torch.no_grad():
        states = critic.model.model(torch.tensor([[7, 8, 9, 10, 2]])).last_hidden_state[0]
        values = critic.head(states)
    _close(fields["bootstrap_values"][1], values[4].item())
    _close(fields["values"][1, :2], values[2:4].tolist())
