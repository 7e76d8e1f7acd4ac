"""Trainers on prompts that are sampled by their length, and on truncated sampling in general."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlkit.config import TrainerConfig
from rlkit.controllers.actor import ActorController
from rlkit.controllers.critic import CriticController
from rlkit.controllers.reference import ReferenceController
from rlkit.engines import logprobs
from rlkit.errors import ConfigError, DataError
from rlkit.trainers.grpo import GRPOTrainer
from rlkit.trainers.hybrid import HybridTrainer
from rlkit.trainers.online_dpo import OnlineDPOTrainer
from rlkit.trainers.ppo import PPOTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.gradients import distance, watch
from tests.trainers.toys import CONFIG, good

SHORT, MIDDLE, LONG = "the film", "the film was so", "the film was so very good and the day"
BOUNDS = {"adaptive_short_prompt": 3, "adaptive_long_prompt": 6, "adaptive_long_top_k": 4}
ADAPTIVE = {**CONFIG, "batch_size": 12, "adaptive_sampling": True, **BOUNDS}


def actor() -> ActorController:
    return ActorController(tiny_model(initializer_range=0.3), tiny_tokenizer())


def words(response: str) -> float:
    """Number of different words."""
    return float(len(set(response.split())))


def grpo(reward: Any = words, prompts: Any = (SHORT, MIDDLE, LONG), reference: bool = False, **config: Any) -> Any:
    policy = actor()
    against = ReferenceController(policy) if reference else None
    settings = {**ADAPTIVE, "group_size": 4, **config}
    return GRPOTrainer(policy, reward, against, prompts=list(prompts), config=settings)


def gathered(trainer: Any) -> Any:
    """The batch that the next step would learn from."""
    trainer.follow_settings()
    return trainer.gather()[0]


def parameters(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.actor.model.parameters()])


def test_every_rollout_says_what_it_was_sampled_from() -> None:
    batch = gathered(grpo(temperature=1.2, top_p=0.9))
    wanted = {SHORT: (0.0, 0, 1.0), MIDDLE: (1.2, 0, 0.9), LONG: (0.7, 4, 1.0)}
    for row, prompt in enumerate(batch.prompts):
        found = batch.temperatures[row].item(), batch.top_ks[row].item(), batch.top_ps[row].item()
        assert found == pytest.approx(wanted[prompt])
    plain = gathered(grpo(adaptive_sampling=False, temperature=0.8, top_k=7))
    assert plain.temperatures.tolist() == pytest.approx([0.8] * 12)
    assert plain.top_ks.tolist() == [7] * 12


def test_responses_handed_on_early_say_the_same() -> None:
    trainer = grpo(temperature=1.2, top_p=0.9)
    trainer.follow_settings()
    early: dict[int, tuple[float, ...]] = {}

    def values(fields: Any, place: int) -> tuple[float, ...]:
        names = ("temperatures", "top_ks", "top_ps")
        return (*(fields[name][place].item() for name in names), fields["responses"][place])

    def emit(rows: list[int], fields: Any) -> None:
        early.update({row: values(fields, place) for place, row in enumerate(rows)})

    whole = trainer.actor.run_streaming(trainer.draw(), emit)
    assert [early[row] for row in range(12)] == [values(whole, row) for row in range(12)]
    assert len({entry[:3] for entry in early.values()}) == 3


@pytest.mark.parametrize("scored", [False, True])
def test_the_first_ratio_is_1_and_the_sampler_agrees(scored: bool) -> None:
    """Whether the log-probs before the update come from a pass of their own or from the update."""
    metrics = grpo(ppo_epochs=2 if scored else 1, top_p=0.8).step().metrics
    assert metrics["train/first_ratio_max_abs_log"] == pytest.approx(0, abs=1e-5)
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    assert metrics["rollout/greedy_fraction"] == pytest.approx(1 / 3)
    assert metrics["train/skipped_updates"] == 0


@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 20, "top_p": 0.7, "temperature": 1.4}], ids=str
)
def test_truncation_of_all_rows_leaves_no_gap(cut: dict[str, Any]) -> None:
    metrics = grpo(adaptive_sampling=False, ppo_epochs=2, **cut).step().metrics
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    assert metrics["train/first_ratio_max_abs_log"] == pytest.approx(0, abs=1e-5)
    assert "rollout/greedy_fraction" not in metrics


def test_greedy_rows_go_through_no_scoring_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither reference, nor scores before the update, nor the update compute what is known or weighs nothing."""
    seen: list[int] = []
    real = logprobs._states

    def states(model: Any, head: Any, ids: torch.Tensor, attention_mask: torch.Tensor, mask: torch.Tensor) -> Any:
        seen.append(int(mask.sum()))
        return real(model, head, ids, attention_mask, mask)

    trainer = grpo(reference=True, kl_coef=0.1, ppo_epochs=2)
    trainer.follow_settings()
    monkeypatch.setattr(logprobs, "_states", states)
    batch, lessons = trainer.gather()
    drawn = batch.temperatures > 0
    tokens = int(batch.response_mask[drawn].sum())
    assert seen == [tokens, tokens]
    for name in ("ref_logprobs", "logprobs"):
        assert not batch[name][~drawn].any()
        assert batch[name][drawn][batch.response_mask[drawn]].all()
    trainer.learner.learn(lessons, 0)
    assert seen == [tokens] * 4


def test_metrics_of_what_was_sampled_leave_greedy_rows_out() -> None:
    """They are means over the tokens and responses that were drawn at random."""
    twins = [grpo(reference=True, kl_coef=0.1) for _ in range(2)]
    for trainer in twins:
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in trainer.reference.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
    metrics, batch = twins[0].step().metrics, gathered(twins[1])
    drawn = batch.temperatures > 0
    assert drawn.tolist().count(False) == 4
    apart = batch.select(drawn)
    ratio = (apart.ref_logprobs - apart.rollout_logprobs) * apart.response_mask
    kl = (ratio.exp() - 1 - ratio).sum()
    assert float(kl) > 1e-2
    assert metrics["kl/per_response"] == pytest.approx(float(kl) / 8, rel=1e-4)
    assert metrics["kl/per_token"] == pytest.approx(float(kl / apart.response_mask.sum()), rel=1e-4)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_greedy_rows_are_not_learned_from(aggregation: str) -> None:
    """The gradient is that of the other rows by themselves, whatever the greedy ones are rewarded with."""
    trainer = grpo(loss_aggregation=aggregation)
    batch = gathered(trainer)
    greedy = batch.temperatures == 0
    assert not batch.learn_mask[greedy].any()
    assert torch.equal(batch.learn_mask[~greedy], batch.response_mask[~greedy])
    gradients = []
    for part in (batch, batch.select(~greedy), batch.with_fields({"advantages": batch.advantages + greedy[:, None]})):
        updates = watch(trainer)
        objective = trainer.policy_objective()
        objective.accumulate(part, objective.weights(part), 1.0, first=True)
        gradients.append(torch.cat([p.grad.flatten().clone() for p in trainer.actor.model.parameters()]))
        trainer.learner.engines["policy"].clear()
        assert not updates.gradients
    assert gradients[0].norm() > 1e-3
    assert distance(gradients[1], gradients[0]) < 1e-5
    assert distance(gradients[2], gradients[0]) < 1e-5


def test_micro_batches_change_nothing() -> None:
    whole, cut = grpo(top_k=9), grpo(top_k=9, micro_batch_size=1)
    seen = watch(whole), watch(cut)
    whole.step(), cut.step()
    assert distance(seen[1].gradients[0], seen[0].gradients[0]) < 1e-5


def test_a_step_of_greedy_responses_alone_is_refused_and_can_be_taken_again() -> None:
    trainer = grpo(prompts=[SHORT, MIDDLE], adaptive_short_prompt=5)
    before = parameters(trainer).clone(), trainer.actor.rng.get_state()
    with pytest.raises(DataError, match=r"all 12 responses .* greedy.* 2 to 4 tokens.* Lower adaptive_short_prompt"):
        trainer.step()
    assert torch.equal(parameters(trainer), before[0])
    assert torch.equal(trainer.actor.rng.get_state(), before[1])
    trainer.set(adaptive_short_prompt=3)
    assert 0 < trainer.step().metrics["rollout/greedy_fraction"] < 1


def test_settings_are_there_with_adaptive_sampling_alone() -> None:
    names = {name for name in TrainerConfig.live_fields() if name.startswith("adaptive_")}
    assert len(names) == 8
    trainer = grpo()
    assert names <= set(trainer.settings())
    assert names <= set(trainer.setting_specs())
    trainer.set(adaptive_long_top_k=2, adaptive_long_temperature=1.5)
    batch = gathered(trainer)
    long = torch.tensor([prompt == LONG for prompt in batch.prompts])
    assert set(batch.top_ks[long].tolist()) == {2}
    assert set(batch.temperatures[long].tolist()) == {1.5}
    with pytest.raises(ConfigError, match="adaptive_sampling is fixed"):
        trainer.set(adaptive_sampling=False)
    with pytest.raises(ConfigError, match="short and long at once"):
        trainer.set(adaptive_short_prompt=8)
    plain = grpo(adaptive_sampling=False)
    assert not names & set(plain.settings())
    with pytest.raises(ConfigError, match="adaptive_long_top_k means nothing to this GRPOTrainer"):
        plain.set(adaptive_long_top_k=2)


def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened() -> None:
    straight, first, resumed = grpo(), grpo(), grpo()
    straight.step(), straight.step()
    first.step()
    resumed.load_state_dict(first.state_dict())
    resumed.step()
    assert torch.equal(parameters(straight), parameters(resumed))


def test_the_kl_to_an_equal_reference_is_0_and_stays_finite() -> None:
    """After large updates the policy samples tokens that the reference would not; every term is still a number."""
    trainer = grpo(reference=True, kl_coef=0.1, kl_placement="loss", kl_estimator="k3+", lr=3e-2, top_k=2)
    assert trainer.step().metrics["kl/per_token"] == pytest.approx(0, abs=1e-6)
    later = [trainer.step() for _ in range(4)]
    assert all(math.isfinite(result.metrics["kl/per_token"]) for result in later)
    assert later[-1].metrics["kl/per_token"] > 0
    batch = gathered(trainer)
    with torch.no_grad():
        full = trainer.reference.model(
            batch.generated_ids, attention_mask=batch.full_attention_mask, position_ids=batch.position_ids
        ).logits[:, batch.prompt_width - 1 : -1]
    own = full.gather(-1, batch.generated_ids[:, batch.prompt_width :, None])
    rank = (full > own).sum(-1)
    outside = (rank >= batch.top_ks[:, None]) & (batch.top_ks[:, None] > 0) & batch.response_mask
    assert outside.any()
    # With the token that was sampled beside the reference's set of two, or of four.
    temperature = batch.temperatures[:, None, None]
    kept = (full >= full.topk(4).values[..., 3:]) & (batch.top_ks == 4)[:, None, None]
    kept |= (full >= full.topk(2).values[..., 1:]) & (batch.top_ks == 2)[:, None, None]
    kept |= full == own
    wanted = (
        (full / temperature)
        .masked_fill(~kept, -math.inf)
        .log_softmax(-1)
        .gather(-1, batch.generated_ids[:, batch.prompt_width :, None])[..., 0]
    )
    torch.testing.assert_close(batch.ref_logprobs[outside], wanted[outside], atol=1e-4, rtol=0)


def test_ppo_on_a_shared_trunk_scores_what_was_sampled() -> None:
    policy = actor()
    trainer = PPOTrainer(
        policy,
        CriticController(trunk=policy),
        good,
        ReferenceController(policy),
        prompts=[SHORT, MIDDLE, LONG],
        config={**ADAPTIVE, "kl_coef": 0.1, "bootstrap_truncated": True},
    )
    metrics = trainer.step().metrics
    assert metrics["train/first_ratio_max_abs_log"] == pytest.approx(0, abs=1e-5)
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    assert metrics["kl/per_token"] == pytest.approx(0, abs=1e-6)


def test_pairs_are_scored_alike_by_policy_and_reference() -> None:
    """With equal weights every margin is 0 and the loss ln 2, on sampled pairs and on pairs from data."""
    policy = actor()
    online = OnlineDPOTrainer(
        policy, good, ReferenceController(policy), prompts=[MIDDLE, LONG], config={**ADAPTIVE, "group_size": 6}
    )
    result = online.step()
    assert result.metrics["preferences/pairs"] > 0
    assert result.metrics["preferences/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert "adaptive_long_top_k" in online.settings()
    policy = actor()
    pairs = [{"prompt": "the film was", "chosen": "very good", "rejected": "bad"}]
    hybrid = HybridTrainer(
        policy, good, pairs, None, ReferenceController(policy), prompts=[MIDDLE], config={**ADAPTIVE, "group_size": 4}
    )
    drawn = hybrid.preferences.draw(1).rollouts
    raw = policy.scores(drawn, 1.0).logprobs.detach()
    torch.testing.assert_close(drawn.ref_logprobs, raw, atol=1e-6, rtol=0)
    assert hybrid.step().metrics["preferences/loss"] == pytest.approx(math.log(2), abs=1e-6)
