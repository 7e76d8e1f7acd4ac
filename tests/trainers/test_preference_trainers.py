"""DPO on pairs from data, on pairs the policy samples, and beside a policy loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reference import ReferenceController
from rlkit.errors import ConfigError, DataError, RequestRefused
from rlkit.trainers.base import Trainer
from rlkit.trainers.dpo import DPOTrainer
from rlkit.trainers.hybrid import HybridTrainer
from rlkit.trainers.online_dpo import OnlineDPOTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.toys import CONFIG, PROMPTS, good

PAIRS = [
    {"prompt": "the film was", "chosen": "very good", "rejected": "bad"},
    {"prompt": "the day is", "chosen": "good", "rejected": "not so good and bad"},
    {"prompt": "food was a", "chosen": "good good day", "rejected": "bad bad"},
    {"prompt": "it is not so", "chosen": "bad", "rejected": "very bad film"},
]


def actor(seed: int = 0, **changes: Any) -> ActorController:
    return ActorController(tiny_model(seed, **changes), tiny_tokenizer())


def dpo(pairs: Any = PAIRS, **config: Any) -> DPOTrainer:
    return DPOTrainer(actor(), pairs, config={"batch_size": 4, "lr": 1e-3, "threads": 1, **config})


def online(reward: Any = good, **config: Any) -> OnlineDPOTrainer:
    policy = actor()
    return OnlineDPOTrainer(
        policy, reward, ReferenceController(policy), prompts=PROMPTS, config={**CONFIG, "group_size": 4, **config}
    )


def hybrid(critic: bool = False, **config: Any) -> HybridTrainer:
    policy = actor()
    value = CriticController(trunk=policy) if critic else None
    return HybridTrainer(
        policy, good, PAIRS, value, ReferenceController(policy), prompts=PROMPTS, config={**CONFIG, **config}
    )


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.actor.model.parameters()])


def with_plain_descent(trainer: Any) -> Any:
    """Adam's first update sees signs only; plain descent shows the gradient itself."""
    from rlkit.trainers.base import new_learner

    trainer.actor.optimizer = torch.optim.SGD(trainer.actor.model.parameters(), lr=1.0)
    trainer.learner = new_learner(trainer)
    for name in ("objective", "preference_objective"):
        if hasattr(trainer, name):
            getattr(trainer, name).engine = trainer.learner.engines["policy"]
    return trainer


# DPO


def test_the_first_loss_is_log_two_and_the_margin_grows() -> None:
    trainer = dpo()
    first = trainer.step()
    assert first.metrics["preferences/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first.metrics["preferences/margin"] == pytest.approx(0, abs=1e-6)
    for _ in range(15):
        last = trainer.step().metrics
    assert last["preferences/accuracy"] == 1.0
    assert last["preferences/margin"] > 0.3
    assert last["preferences/loss"] < 0.55


def test_the_loss_of_a_step_is_dpos_by_hand() -> None:
    trainer = dpo(beta=0.3)
    for _ in range(2):
        trainer.step()
    pairs = trainer.preferences.draw(4)
    policy = (trainer.actor.scores(pairs.rollouts, 1.0).logprobs * pairs.rollouts.response_mask).sum(1)
    reference = (pairs.rollouts.ref_logprobs * pairs.rollouts.response_mask).sum(1)
    h = (policy - reference)[0::2] - (policy - reference)[1::2]
    wanted = -torch.nn.functional.logsigmoid(0.3 * h).mean()
    trainer.preferences.source._epochs._position = 0  # the same four pairs again
    assert trainer.step().metrics["preferences/loss"] == pytest.approx(float(wanted.detach()), rel=1e-5)


def test_the_reference_never_moves() -> None:
    trainer = dpo()
    assert trainer.reference is not None
    before = {name: p.clone() for name, p in trainer.reference.model.named_parameters()}
    for _ in range(3):
        trainer.step()
    assert all(torch.equal(p, before[name]) for name, p in trainer.reference.model.named_parameters())


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
@pytest.mark.parametrize("micro", [1, 3])
def test_micro_batches_change_neither_weights_nor_metrics(kind: str, micro: int) -> None:
    whole = with_plain_descent(dpo(preference_loss=kind))
    split = with_plain_descent(dpo(preference_loss=kind, micro_batch_size=micro))
    before = weights(whole).clone()
    a, b = whole.step().metrics, split.step().metrics
    moved = weights(whole) - before
    assert moved.norm() > 1e-6
    assert (weights(split) - before - moved).norm() / moved.norm() < 1e-5
    for name in ("loss", "margin", "chosen_logprob"):  # accuracy is a toss-up at a margin of 0
        assert b[f"preferences/{name}"] == pytest.approx(a[f"preferences/{name}"], rel=1e-5, abs=1e-6)


def test_without_a_reference_the_margin_is_that_of_the_policy() -> None:
    trainer = DPOTrainer(actor(), PAIRS, reference_free=True, config={"batch_size": 4, "beta": 1.0})
    metrics = trainer.step().metrics
    assert trainer.reference is None
    gap = metrics["preferences/chosen_logprob"] - metrics["preferences/rejected_logprob"]
    assert metrics["preferences/margin"] == pytest.approx(gap, rel=1e-5)


def test_average_logprobs_take_the_length_out() -> None:
    assert dpo().step().metrics["preferences/rejected_logprob"] < -9
    per_token = dpo(average_logprobs=True).step().metrics
    assert -5 < per_token["preferences/rejected_logprob"] < -3
    assert -5 < dpo(preference_loss="ipo").step().metrics["preferences/rejected_logprob"] < -3  # IPO's own choice


def test_state_goes_on_exactly() -> None:
    straight, stopped = dpo(batch_size=3), dpo(batch_size=3)
    for _ in range(4):
        straight.step()
    for _ in range(2):
        stopped.step()
    resumed = dpo(batch_size=3)
    resumed.load_state_dict(stopped.state_dict())
    rows = [resumed.step().rollouts["row"] for _ in range(2)]
    assert resumed.global_step == 4
    assert torch.equal(weights(resumed), weights(straight))
    assert len(rows) == 2


def test_evaluation_changes_nothing() -> None:
    trainer = dpo()
    before, state = weights(trainer).clone(), trainer.preferences.state_dict()
    measured = trainer.evaluate(PAIRS[:2])
    assert measured["preferences/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert torch.equal(weights(trainer), before)
    assert trainer.preferences.state_dict() == state
    assert trainer.actor.model.lm_head.weight.grad is None


def test_the_table_holds_both_answers_of_each_pair() -> None:
    table = dpo(batch_size=2).step().rollouts
    assert table["preference"] == [1, -1, 1, -1]
    assert all(table["prompt"][i] == table["prompt"][i + 1] for i in (0, 2))
    assert {*table["response"]} <= {text for pair in PAIRS for text in (pair["chosen"], pair["rejected"])}


def test_its_dataflow_runs_the_reference_alone_and_feeds_the_actor() -> None:
    graph = dpo().dataflow_json()
    assert [node["name"] for node in graph["nodes"]] == ["actor", "reference"]
    kinds = {(edge["from"], edge["to"]): edge["kind"] for edge in graph["edges"]}
    assert kinds == {("actor", "reference"): "input", ("reference", "actor"): "feedback"}


def test_what_dpo_cannot_do_is_refused() -> None:
    with pytest.raises(DataError, match="no pairs to learn from"):
        DPOTrainer(actor(), None)
    with pytest.raises(ConfigError, match="kl_coef has no place in DPO"):
        dpo(kl_coef=0.1)
    with pytest.raises(ConfigError, match="kl_coef means nothing to this DPOTrainer"):
        dpo().set(kl_coef=0.1)
    with pytest.raises(ConfigError, match="label_smoothing has no meaning"):
        dpo(preference_loss="hinge", label_smoothing=0.1)
    with pytest.raises(ConfigError, match="reference_free"):
        DPOTrainer(actor(), PAIRS, ReferenceController(actor()), reference_free=True)


def test_a_background_run_of_dpo_goes_on_and_comes_back(tmp_path: Any) -> None:
    trainer = dpo()
    trainer.step()
    run = trainer.start(str(tmp_path / "run"))
    assert run.set(beta=0.5).wait(60).state == "applied"
    with pytest.raises(RequestRefused, match="reward_weights"):
        run.set(reward_weights={"good": 1.0}).wait(60)
    run.stop().wait(60)
    run.wait(60)
    assert "preferences/loss" in run.metrics
    assert set(run.rollouts["preference"]) == {1.0, -1.0}
    assert run.load() is trainer
    assert trainer.settings()["beta"] == 0.5
    assert trainer.step().step == run.metrics.index.max() + 1


# Online DPO


def test_online_pairs_are_the_best_and_the_worst_of_a_group() -> None:
    trainer = online()
    batch = trainer.evaluate()
    for group in batch.groups.unique():
        rows = batch.groups == group
        rewards, sides = batch.rewards[rows], batch.preferences[rows]
        if rewards.max() == rewards.min():
            assert not sides.any()
        else:
            assert rewards[sides == 1].item() == rewards.max()
            assert rewards[sides == -1].item() == rewards.min()
    metrics = trainer.step().metrics
    assert metrics["preferences/loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_a_step_without_pairs_learns_nothing_and_goes_on() -> None:
    trainer = online(reward=lambda responses: [1.0] * len(responses))
    before = weights(trainer).clone()
    metrics = trainer.step().metrics
    assert metrics["preferences/pairs"] == 0
    assert torch.equal(weights(trainer), before)
    assert trainer.actor.policy_version == 0
    assert trainer.global_step == 1


def test_online_dpo_needs_groups() -> None:
    with pytest.raises(ConfigError, match="two responses"):
        online(group_size=1)


# Hybrid


@pytest.mark.parametrize("critic", [False, True], ids=["grpo", "ppo"])
def test_the_gradient_is_the_sum_of_both_by_the_ratio(critic: bool) -> None:
    moves = []
    for ratio in (0.0, 0.25, 1.0):
        trainer = with_plain_descent(hybrid(critic, dpo_ratio=ratio, value_coef=0.0, max_grad_norm=1e9, lr=1.0))
        before = weights(trainer).clone()
        trainer.step()
        moves.append(weights(trainer) - before)
    policy, mixed, preference = moves
    assert policy.norm() > 1e-6
    assert preference.norm() > 1e-6
    wanted = 0.75 * policy + 0.25 * preference
    assert (mixed - wanted).norm() / wanted.norm() < 1e-4


def test_the_ratio_moves_on_its_schedule_and_live() -> None:
    trainer = hybrid(dpo_ratio=1.0, dpo_ratio_end=0.0, dpo_ratio_steps=4)
    seen = [trainer.step().metrics["preferences/ratio"] for _ in range(3)]
    assert seen == [1.0, 0.75, 0.5]
    trainer.set(dpo_ratio_end=0.2)
    assert trainer.step().metrics["preferences/ratio"] == pytest.approx(0.4)  # 1 - 0.8 * 3/4
    trainer.set(dpo_ratio=0.6)  # alone: the schedule, which had come to 0.2, is over
    assert trainer.step().metrics["preferences/ratio"] == 0.6
    trainer.set(dpo_ratio=0.9, dpo_ratio_end=0.3)
    assert trainer.step().metrics["preferences/ratio"] == pytest.approx(0.3)


def test_pairs_are_cut_into_as_many_minibatches_as_rollouts() -> None:
    trainer = hybrid(minibatch_size=4, pairs_per_step=6)
    seen: list[int] = []
    accumulate = trainer.preference_objective.accumulate

    def watched(part: Any, weights: Any, share: float, first: bool) -> None:
        seen.append(len(part))
        accumulate(part, weights, share, first)

    trainer.preference_objective.accumulate = watched  # type: ignore[method-assign]
    trainer.step()
    assert seen == [1, 2, 1, 2]
    assert trainer.actor.policy_version == 4


def test_hybrid_keeps_both_sources_in_its_state_and_puts_them_back_after_a_failure() -> None:
    broken = True

    def sometimes(responses: list[str]) -> list[float]:
        if broken:
            raise ValueError("no network")
        return good(responses)

    policy = actor()
    trainer = HybridTrainer(
        policy,
        sometimes,
        PAIRS,
        None,
        ReferenceController(policy),
        prompts=PROMPTS,
        config={**CONFIG, "pairs_per_step": 3},
    )
    state = trainer.state_dict()
    assert {"prompts", "preferences", "learner", "reward_weights"} <= set(state)
    with pytest.raises(Exception, match="no network"):
        trainer.step()
    assert trainer.preferences.state_dict() == state["preferences"]
    assert trainer.prompts.state_dict() == state["prompts"]
    broken = False
    assert trainer.step().metrics["preferences/loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_hybrid_draws_the_share_of_the_reference_in_its_dataflow() -> None:
    edges = hybrid(dpo_ratio=0.3).dataflow_json()["edges"]
    (share,) = [e["weight"] for e in edges if (e["from"], e["to"], e["kind"]) == ("reference", "actor", "feedback")]
    assert share == 0.3
    with pytest.raises(ConfigError, match="reference=ReferenceController"):
        HybridTrainer(actor(), good, PAIRS)
