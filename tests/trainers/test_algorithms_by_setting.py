"""Estimators, losses, corrections and sampling rules, each by its setting, inside a trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlkit import presets
from rlkit.algorithms.advantages import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    passk_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlkit.algorithms.returns import gae
from rlkit.batch import RolloutBatch
from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reward import RewardController
from rlkit.dataflow import Dataflow
from rlkit.errors import ConfigError, DataflowError
from rlkit.trainers.filling import spread_rows
from rlkit.trainers.ppo import PPOTrainer
from tests.tiny import tiny_classifier, tiny_model, tiny_tokenizer
from tests.trainers.toys import CONFIG, PROMPTS, good, grpo, ppo, short


def length(response: str) -> float:
    """Spreads within nearly every group."""
    return len(response.split()) + 0.1 * response.count("w")


# Estimators


def expected(name: str, batch: RolloutBatch) -> torch.Tensor:
    """What the pure function gives for the rollouts of a batch."""
    token_rewards, mask, groups, totals = batch.token_rewards, batch.learn_mask, batch.groups, batch.rewards
    match name:
        case "grpo":
            return group_advantages(totals, groups)
        case "rloo":
            return rloo_advantages(totals, groups)
        case "reinforce++":
            return reinforce_plus_plus_advantages(token_rewards, mask, 1.0)[0]
        case "reinforce++-baseline":
            return reinforce_plus_plus_baseline_advantages(totals, groups, mask)
        case "remax":
            return remax_advantages(token_rewards, batch.reward_baselines, mask)[0]
        case "gpg":
            return gpg_advantages(totals, groups)
        case _:
            return passk_advantages(totals, groups)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce++", "reinforce++-baseline", "remax", "gpg", "pass@k"])
def test_an_estimator_is_its_pure_function(name: str) -> None:
    batch = grpo(reward=length, advantage_estimator=name).evaluate()
    wanted = expected(name, batch)
    wanted = wanted.unsqueeze(1) if wanted.dim() == 1 else wanted
    assert batch.advantages.abs().max() > 0.1
    torch.testing.assert_close(batch.advantages, wanted * batch.learn_mask)


def test_remax_compares_with_the_greedy_response_to_the_same_prompt() -> None:
    trainer = grpo(reward=length, **{**presets.REMAX, "group_size": 2})
    batch = trainer.evaluate()
    first = batch.select(slice(0, 1))
    ids, model = first.input_ids, trainer.actor.model
    width = ids.shape[1]
    for _ in range(6):  # greedy by hand
        mask = torch.cat(
            [first.attention_mask, torch.ones(1, ids.shape[1] - width, dtype=torch.bool, device=ids.device)], 1
        )
        logits = model(input_ids=ids, attention_mask=mask, position_ids=mask.long().cumsum(1) - 1).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        if int(ids[0, -1]) in trainer.actor.stop_token_ids:
            break
    words = trainer.actor.tokenizer.decode(ids[0, width:], skip_special_tokens=True)
    assert batch.reward_baselines[0] == pytest.approx(length(words))
    assert batch.reward_baselines[0] == batch.reward_baselines[1]
    state = trainer.actor.rng.get_state()
    trainer.evaluate()
    assert torch.equal(trainer.actor.rng.get_state(), state)


def test_gdpo_in_a_trainer_is_the_pure_function() -> None:
    batch = grpo(reward={"length": (length, 0.5), "good": good}, **presets.GDPO).evaluate()
    terms = {"length": batch["reward/length"], "good": batch["reward/good"]}
    wanted = gdpo_advantages(terms, {"length": 0.5, "good": 1.0}, batch.groups, batch.learn_mask)
    torch.testing.assert_close(batch.advantages, wanted * batch.learn_mask, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", presets.__all__)
def test_every_preset_is_a_configuration_that_takes_a_step(name: str) -> None:
    settings = getattr(presets, name)
    with pytest.raises(TypeError):
        settings["lr"] = 1.0  # presets are read-only
    trainer = grpo(reward=length, **settings)
    before = [p.clone() for p in trainer.actor.model.parameters()]
    trainer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.actor.model.parameters(), strict=True))
    assert all(torch.isfinite(p).all() for p in trainer.actor.model.parameters())


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++-baseline", "gpg", "pass@k"])
def test_a_group_of_one_is_refused_where_it_never_learns(estimator: str) -> None:
    with pytest.raises(ConfigError, match="group of one"):
        grpo(group_size=1, advantage_estimator=estimator)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="reward_normalization={'\\*': 'group'}"):
        grpo(advantage_estimator="gdpo")
    with pytest.raises(ConfigError, match="loss_aggregation='seq-mean-token-mean'"):
        TrainerConfig(policy_loss="gmpo")
    with pytest.raises(ConfigError, match="names the term 'god'; the terms are good"):
        grpo(reward_normalization={"god": "batch"})
    with pytest.raises(ConfigError, match="is none of 'none', 'batch', 'group'"):
        TrainerConfig(reward_normalization={"good": "all"})
    with pytest.raises(ConfigError, match="below"):
        TrainerConfig(correction_floor=3.0)
    with pytest.raises(ConfigError, match="rejection_kind to 'k3'"):
        TrainerConfig(rejection="sequence-max")


# Rewards


def test_terms_are_normalised_before_they_are_weighted_and_stay_raw_in_the_table() -> None:
    trainer = grpo(
        reward={"length": (length, 2.0), "good": good}, reward_normalization={"length": "batch", "*": "group"}
    )
    batch = trainer.evaluate()
    raw = batch["reward/length"]
    scaled = (raw - raw.mean()) / (raw.std() + 1e-6)
    wanted = 2.0 * scaled + group_advantages(batch["reward/good"], batch.groups)
    torch.testing.assert_close(batch.rewards, wanted, rtol=1e-4, atol=1e-4)
    table = trainer.step().rollouts
    assert table["reward/length"] == pytest.approx([length(text) for text in table["response"]], rel=1e-5)


# Sampling rules


def rare(responses: list[str]) -> list[float]:
    """1 where a response holds one word: most groups have no spread."""
    return [float("film" in response.split()) for response in responses]


def test_dynamic_sampling_fills_the_batch_with_groups_that_differ() -> None:
    plain = grpo(reward=rare).step().metrics
    assert plain["rollout/groups_without_spread_fraction"] > 0
    trainer = grpo(reward=rare, dynamic_sampling=True, max_sampling_rounds=20)
    result = trainer.step()
    assert result.metrics["rollout/groups_without_spread_fraction"] == 0
    assert result.metrics["rollout/sampling_rounds"] > 1
    assert len(result.rollouts["reward"]) == 16
    groups: dict[int, set[float]] = {}
    for group, reward in zip(result.rollouts["group"], result.rollouts["reward"], strict=True):
        groups.setdefault(group, set()).add(reward)
    assert len(groups) == 4
    assert all(len(rewards) > 1 for rewards in groups.values())


def test_dynamic_sampling_ends_after_its_rounds_with_what_there_is() -> None:
    trainer = grpo(reward=lambda responses: [1.0] * len(responses), dynamic_sampling=True, max_sampling_rounds=3)
    before = [p.clone() for p in trainer.actor.model.parameters()]
    metrics = trainer.step().metrics
    assert metrics["rollout/sampling_rounds"] == 3
    assert metrics["rollout/resampled_fraction"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.actor.model.parameters(), strict=True))


def test_the_whole_filled_batch_is_whitened_at_once() -> None:
    trainer = grpo(
        reward=rare, dynamic_sampling=True, max_sampling_rounds=20, advantage_estimator="reinforce++-baseline"
    )
    batch, _ = trainer.gather()
    values = batch.advantages[batch.learn_mask]
    assert float(values.mean()) == pytest.approx(0, abs=1e-5)
    assert float(values.var()) == pytest.approx(1, abs=1e-3)
    assert bool(spread_rows(batch).all())


def test_masked_truncation_leaves_cut_responses_out_of_the_loss() -> None:
    trainer = grpo(reward=length, mask_truncated=True, max_new_tokens=3)
    batch = trainer.evaluate()
    cut = torch.tensor([reason == "length" for reason in batch.finish_reasons], device=batch.device)
    assert bool(cut.any())
    assert not bool(batch.learn_mask[cut].any())
    assert torch.equal(batch.learn_mask[~cut], batch.response_mask[~cut])
    assert trainer.step().metrics["train/tokens_left_out_fraction"] > 0


def opinionated(trainer: PPOTrainer) -> PPOTrainer:
    """The same trainer with a value head that says something: a fresh one says 0."""
    assert trainer.critic is not None
    torch.manual_seed(3)
    for parameter in trainer.critic.head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return trainer


@pytest.mark.parametrize("trunk", [True, False], ids=["trunk", "own model"])
def test_truncated_responses_go_on_to_the_critics_value(trunk: bool) -> None:
    plain = opinionated(ppo(reward=length, trunk=trunk, whiten_advantages=False)).evaluate()
    batch = opinionated(ppo(reward=length, trunk=trunk, whiten_advantages=False, bootstrap_truncated=True)).evaluate()
    cut = torch.tensor([reason == "length" for reason in batch.finish_reasons], device=batch.device)
    assert bool(cut.any())
    torch.testing.assert_close(batch.values * batch.response_mask, plain.values * batch.response_mask)
    after = batch.bootstrap_values * cut
    wanted, returns = gae(batch.token_rewards, batch.values, batch.response_mask, 1.0, 0.95, after)
    torch.testing.assert_close(batch.advantages, wanted)
    assert not torch.allclose(batch.advantages[cut], plain.advantages[cut])
    torch.testing.assert_close(batch.advantages[~cut], plain.advantages[~cut])
    torch.testing.assert_close(batch.returns, returns * batch.response_mask)


def test_the_bootstrap_value_is_that_of_the_finished_response() -> None:
    trainer = opinionated(ppo(reward=length, bootstrap_truncated=True))
    batch = trainer.evaluate()
    row, size = batch.select(slice(0, 1)), int(batch.response_lengths[0])
    ids = torch.cat([row.input_ids[row.attention_mask], row.generated_ids[0, batch.prompt_width :][:size]])
    assert trainer.critic is not None
    state = trainer.actor.model(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0, -1]
    torch.testing.assert_close(batch.bootstrap_values[0], trainer.critic.head(state[None, None])[0, 0])


# Correction of rollouts


class Skewed(ActorController):
    """Its sampler reports log-probs that are off by 0.5 on every second token."""

    def run(self, batch: RolloutBatch) -> Any:
        fields = dict(super().run(batch))
        off = torch.zeros_like(fields["rollout_logprobs"])
        off[:, ::2] = 0.5
        return {**fields, "rollout_logprobs": (fields["rollout_logprobs"] - off) * fields["response_mask"]}

    def run_streaming(self, batch: RolloutBatch, emit: Any) -> Any:
        return self.run(batch)


def skewed(**config: Any) -> PPOTrainer:
    actor = Skewed(tiny_model(), tiny_tokenizer())
    settings = {**CONFIG, "whiten_advantages": False, **config}
    return PPOTrainer(actor, CriticController(trunk=actor), length, prompts=PROMPTS, config=settings)


def test_correction_weights_are_the_truncated_ratios() -> None:
    batch = skewed(correction_weights="token", correction_threshold=1.5).evaluate()
    weights = batch.correction_weights
    even = batch.response_mask.clone()
    even[:, 1::2] = False
    odd = batch.response_mask & ~even
    torch.testing.assert_close(weights[even], torch.full_like(weights[even], 1.5))  # exp(0.5) = 1.65, cut at 1.5
    torch.testing.assert_close(weights[odd], torch.ones_like(weights[odd]))


def test_tokens_on_which_sampler_and_trainer_disagree_are_rejected() -> None:
    trainer = skewed(rejection="token", rejection_band=1.4)
    batch = trainer.evaluate()
    assert not bool(batch.learn_mask[:, ::2].any())
    assert torch.equal(batch.learn_mask[:, 1::2], batch.response_mask[:, 1::2])
    metrics = trainer.step().metrics
    assert metrics["correction/rejected_token_fraction"] == pytest.approx(
        metrics["train/tokens_left_out_fraction"], rel=1e-6
    )


def test_weights_scale_the_gradient() -> None:
    """With every weight at its ceiling 2 the gradient of the policy loss is twice that without correction."""

    class Far(ActorController):
        def run(self, batch: RolloutBatch) -> Any:
            fields = dict(super().run(batch))
            return {**fields, "rollout_logprobs": (fields["rollout_logprobs"] - 3.0) * fields["response_mask"]}

        def run_streaming(self, batch: RolloutBatch, emit: Any) -> Any:
            return self.run(batch)

    def norm(**config: Any) -> float:
        actor = Far(tiny_model(), tiny_tokenizer())
        settings = {**CONFIG, "value_coef": 0.0, "max_grad_norm": 1e9, **config}
        trainer = PPOTrainer(actor, CriticController(trunk=actor), length, prompts=PROMPTS, config=settings)
        return trainer.step().metrics["train/grad_norm"]

    assert norm(correction_weights="token", correction_threshold=2.0) == pytest.approx(2 * norm(), rel=1e-4)


# Reward models that learn


def with_feedback(weight: float | None = 0.1, **config: Any) -> tuple[PPOTrainer, RewardController]:
    actor = ActorController(tiny_model(), tiny_tokenizer())
    critic = CriticController(trunk=actor)
    reward = RewardController(tiny_classifier(), tiny_tokenizer(), name="model")
    flow = Dataflow().connect(actor.output, reward.input).connect(critic.output, reward.feedback, weight=weight)
    trainer = PPOTrainer(actor, critic, reward, prompts=PROMPTS, config={**CONFIG, **config}, dataflow=flow)
    return trainer, reward


def test_a_reward_model_follows_the_critic_by_the_weight_of_its_edge() -> None:
    small, _ = with_feedback(0.1, max_grad_norm=1e9)
    large, _ = with_feedback(0.4, max_grad_norm=1e9)
    a, b = small.step().metrics, large.step().metrics
    assert b["train/reward_model_grad_norm"] == pytest.approx(4 * a["train/reward_model_grad_norm"], rel=1e-4)
    assert b["feedback/model_loss"] == pytest.approx(a["feedback/model_loss"], rel=1e-5)


def test_the_feedback_loss_is_half_the_squared_distance_to_the_value_before_the_last_token() -> None:
    trainer, _ = with_feedback()
    batch = opinionated(trainer).evaluate()
    last = (batch.response_lengths - 1).unsqueeze(1)
    distance = batch["reward/model"] - batch.values.gather(1, last).squeeze(1)
    assert trainer.step().metrics["feedback/model_loss"] == pytest.approx(
        float(0.5 * distance.square().mean()), rel=1e-4
    )


def test_a_learning_reward_model_is_part_of_the_state() -> None:
    trainer, reward = with_feedback(None)
    assert reward.model is not None
    before = reward.model.score.weight.detach().clone()
    for _ in range(2):
        trainer.step()
    assert not torch.equal(reward.model.score.weight, before)
    again, other = with_feedback(None)
    again.load_state_dict(trainer.state_dict())
    assert other.model is not None
    assert torch.equal(other.model.score.weight, reward.model.score.weight)
    assert "model" not in trainer.frozen_state_dict()
    assert trainer.step().metrics["feedback/model_loss"] == again.step().metrics["feedback/model_loss"]


def test_feedback_into_a_callable_is_refused() -> None:
    actor = ActorController(tiny_model(), tiny_tokenizer())
    critic, reward = CriticController(trunk=actor), RewardController(good)
    flow = Dataflow().connect(actor.output, reward.input).connect(critic.output, reward.feedback)
    with pytest.raises(DataflowError, match="cannot learn"):
        PPOTrainer(actor, critic, reward, prompts=PROMPTS, config=CONFIG, dataflow=flow)


def test_swapped_rewards_change_the_dataflow_and_its_weights() -> None:
    actor = ActorController(tiny_model(), tiny_tokenizer())
    trainer = PPOTrainer(actor, CriticController(trunk=actor), {"good": good}, prompts=PROMPTS, config=CONFIG)
    trainer.set_multi_reward_controllers([(RewardController(good), 0.4), (RewardController(short), 0.6)])
    assert trainer.settings()["reward_weights"] == {"good": 0.4, "short": 0.6}
    table = trainer.step().rollouts
    assert table["reward"][0] == pytest.approx(0.4 * table["reward/good"][0] + 0.6 * table["reward/short"][0])
