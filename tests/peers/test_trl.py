"""One step on one batch beside TRL 1.x: losses and gradients of every parameter, relative difference below 1e-5.

TRL's own trainers compute theirs, from batches that its collator (DPO) or its sampling (GRPO) made. What the two
libraries mean by a name is not always the same; the table of cases says which settings correspond, and where none do a
test says why and derives rlkit's value by itself.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import DPOConfig, GRPOConfig
from trl import DPOTrainer as PeerDPO
from trl import GRPOTrainer as PeerGRPO

from rlkit.batch import RolloutBatch
from rlkit.controllers.actor import ActorController
from rlkit.controllers.reference import ReferenceController
from rlkit.trainers.dpo import DPOTrainer
from rlkit.trainers.estimators import CriticFreeAdvantages
from rlkit.trainers.learner import Lesson
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.gradients import Updates, distance, flat_gradient, watch
from tests.trainers.toys import grpo

QUIET = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "seed": 0}
TOLERANCE = 1e-5


def own(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model: TRL's trainers change what the model they are given returns."""
    return copy.deepcopy(model)


def agree(updates: Updates, loss: float, gradient: Tensor) -> None:
    """The one update seen has this loss and this gradient."""
    assert len(updates.losses) == 1
    assert gradient.norm() > 1e-3
    assert updates.losses[0] == pytest.approx(loss, rel=TOLERANCE, abs=1e-7)
    assert distance(updates.gradients[0], gradient) < TOLERANCE


# DPO

PAIRS = [
    {"prompt": "the film was", "chosen": " very good and so is it", "rejected": " bad"},
    {"prompt": "food", "chosen": " is good", "rejected": " was not a very good day"},
    {"prompt": "it is not so", "chosen": " good day", "rejected": " bad film to it"},
    {"prompt": "the day is a", "chosen": " day of good food", "rejected": " film"},
]


@pytest.fixture(scope="module")
def peer_dpo(tmp_path_factory: pytest.TempPathFactory) -> PeerDPO:
    arguments = DPOConfig(output_dir=str(tmp_path_factory.mktemp("dpo")), **QUIET)
    return PeerDPO(
        own(tiny_model(0)),
        own(tiny_model(1)),
        args=arguments,
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tiny_tokenizer(),
    )


def peer_dpo_step(peer: PeerDPO, count: int, **settings: Any) -> tuple[float, Tensor]:
    """TRL's loss and gradient on the first pairs under these attributes of its trainer."""
    for name, value in {"beta": 0.1, "loss_types": ["sigmoid"], "label_smoothing": 0.0, **settings}.items():
        assert hasattr(peer, name)
        setattr(peer, name, value)
    inputs = peer.data_collator([peer.train_dataset[row] for row in range(count)])
    peer.model.eval()
    peer.model.zero_grad()
    loss = peer.compute_loss(peer.model, inputs)
    loss.backward()
    return float(loss), flat_gradient(list(peer.model.parameters()))


def dpo_step(count: int, **config: Any) -> Updates:
    """rlkit's step on the same pairs."""
    actor = ActorController(tiny_model(0), tiny_tokenizer())
    reference = ReferenceController(tiny_model(1), tiny_tokenizer())
    trainer = DPOTrainer(actor, PAIRS[:count], reference, config={"batch_size": count, "lr": 0.0, **config})
    updates = watch(trainer, list(actor.model.parameters()))
    trainer.step()
    return updates


@pytest.mark.parametrize(
    ("config", "peer"),
    [
        ({"beta": 0.1}, {"beta": 0.1}),
        ({"beta": 2.0, "micro_batch_size": 3}, {"beta": 2.0}),
        ({"beta": 0.5, "average_logprobs": True}, {"beta": 0.5, "loss_types": ["sigmoid_norm"]}),
        ({"beta": 0.5, "preference_loss": "hinge"}, {"beta": 0.5, "loss_types": ["hinge"]}),
        ({"beta": 0.2, "preference_loss": "ipo"}, {"beta": 0.2, "loss_types": ["ipo"]}),
    ],
    ids=["sigmoid", "sigmoid in micro-batches", "sigmoid per token", "hinge", "ipo"],
)
def test_dpo(peer_dpo: PeerDPO, config: dict[str, Any], peer: dict[str, Any]) -> None:
    """rlkit's "ipo" averages log-probs over tokens unless it is told otherwise, as TRL's always does."""
    agree(dpo_step(4, **config), *peer_dpo_step(peer_dpo, 4, **peer))


def test_dpo_label_smoothing_of_one_pair(peer_dpo: PeerDPO) -> None:
    """TRL's "sigmoid" takes no notice of `label_smoothing`, and its "robust" divides by 1 - 2 smoothing and takes the
    flipped term away (Chowdhury et al. 2024), which is another loss. Its "aot" sorts the pairs of a batch first; on a
    single pair it is the conservative DPO that rlkit means (Mitchell 2023).
    """
    settings = {"beta": 0.7, "label_smoothing": 0.1}
    agree(dpo_step(1, **settings), *peer_dpo_step(peer_dpo, 1, loss_types=["aot"], **settings))


def test_dpo_label_smoothing_of_several_pairs(peer_dpo: PeerDPO) -> None:
    """On several pairs no TRL loss is conservative DPO, but two of its losses make it by hand: with e the smoothing,
    robust = ((1 - e) L(m) - e L(-m)) / (1 - 2e) and L(-m) = L(m) + m, so (1 - e) L(m) + e L(-m) =
    2 (1 - e) sigmoid - (1 - 2e) robust.
    """
    smoothing = 0.2
    plain = peer_dpo_step(peer_dpo, 4, beta=0.7)
    robust = peer_dpo_step(peer_dpo, 4, beta=0.7, loss_types=["robust"], label_smoothing=smoothing)
    loss, gradient = (
        2 * (1 - smoothing) * one - (1 - 2 * smoothing) * other for one, other in zip(plain, robust, strict=True)
    )
    agree(dpo_step(4, beta=0.7, label_smoothing=smoothing), loss, gradient)  # type: ignore[arg-type]


# GRPO

LIMIT = 12
PROMPTS = ["the film was", "food", "it is not so"]


def words(completions: list[str], **_: Any) -> list[float]:
    """A reward with spread in every group: the distinct words of a response."""
    return [len(set(text.split())) + text.count("o") / 7 for text in completions]


@pytest.fixture(scope="module")
def peer_grpo(tmp_path_factory: pytest.TempPathFactory) -> PeerGRPO:
    arguments = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("grpo")),
        num_generations=4,
        per_device_train_batch_size=12,
        steps_per_generation=1,
        max_completion_length=LIMIT,
        **QUIET,
    )
    return PeerGRPO(
        own(tiny_model(0)),
        reward_funcs=words,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        processing_class=tiny_tokenizer(),
    )


@pytest.fixture(scope="module")
def sampled(peer_grpo: PeerGRPO) -> dict[str, Tensor]:
    """A batch that TRL sampled, scored and gave advantages; with log-probs of an older policy and of a reference, from
    plain forwards of one row at a time. The old policy is another model, so that ratios go out of bounds on both sides.
    """
    torch.manual_seed(3)
    peer_grpo.scale_rewards = "group"
    inputs = peer_grpo._generate_and_score_completions([{"prompt": text} for text in PROMPTS for _ in range(4)])
    lengths = inputs["completion_mask"].sum(1)
    assert lengths.min() < LIMIT  # one has ended, so rows are of several lengths
    inputs["old_per_token_logps"] = plain_logprobs(tiny_model(0, initializer_range=0.05), inputs)
    inputs["ref_per_token_logps"] = plain_logprobs(tiny_model(1), inputs)
    return inputs


def plain_logprobs(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """(B,T) log-probs of the responses, each row alone and without padding."""
    logprobs = torch.zeros(inputs["completion_ids"].shape)
    for row, (prompt, answer) in enumerate(
        zip(inputs["prompt_mask"].sum(1), inputs["completion_mask"].sum(1), strict=True)
    ):
        ids = torch.cat([inputs["prompt_ids"][row, -prompt:], inputs["completion_ids"][row, :answer]])[None]
        with torch.no_grad():
            scores = model(ids).logits[0, prompt - 1 : -1].log_softmax(-1)
        logprobs[row, :answer] = scores.gather(-1, ids[0, prompt:, None]).squeeze(-1)
    return logprobs


def peer_grpo_step(peer: PeerGRPO, inputs: dict[str, Tensor], **settings: Any) -> tuple[float, Tensor]:
    """TRL's loss and gradient under these attributes of its trainer; what it keeps in its arguments is set there."""
    defaults = {
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "delta": None,
        "use_bias_correction_kl": False,
        "entropy_coef": 0.0,
    }
    for name, value in {**defaults, **settings}.items():
        holder = peer.args if name in ("delta", "use_bias_correction_kl") else peer
        assert hasattr(holder, name)
        setattr(holder, name, value)
    peer._entropy_bonus_enabled = peer.entropy_coef != 0
    peer.model.eval()
    peer.model.zero_grad()
    loss = peer.compute_loss(peer.model, inputs)
    loss.backward()
    return float(loss), flat_gradient(list(peer.model.parameters()))


def rollouts(inputs: dict[str, Tensor]) -> RolloutBatch:
    """The same batch as rlkit holds it."""
    mask = inputs["completion_mask"].bool()
    return RolloutBatch(
        {
            "input_ids": inputs["prompt_ids"],
            "attention_mask": inputs["prompt_mask"].bool(),
            "generated_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            "response_mask": mask,
            "learn_mask": mask,
            "logprobs": inputs["old_per_token_logps"],
            "rollout_logprobs": inputs["old_per_token_logps"],
            "ref_logprobs": inputs["ref_per_token_logps"],
            "advantages": inputs["advantages"][:, None] * mask,
        }
    )


def grpo_step(inputs: dict[str, Tensor], **config: Any) -> tuple[Updates, dict[str, float]]:
    """rlkit's update on the same batch, and its metrics."""
    with_kl = "kl_coef" in config
    trainer = grpo(
        model=tiny_model(0), reference=with_kl, **{"lr": 0.0, "max_new_tokens": LIMIT, "batch_size": 12, **config}
    )
    updates = watch(trainer, list(trainer.actor.model.parameters()))
    trainer.learner.learn([Lesson(trainer.policy_objective(), rollouts(inputs))], 0)
    return updates, trainer.tracker.flush(0).metrics


GRPO_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token mean": ({}, {}),
    "token mean in micro-batches": ({"micro_batch_size": 5}, {"loss_type": "bnpo"}),
    "clip-higher": ({"clip_high": 0.4}, {"epsilon_high": 0.4}),
    "dual clip": ({"dual_clip": 1.3}, {"delta": 1.3}),
    "response mean": ({"loss_aggregation": "seq-mean-token-mean"}, {"loss_type": "grpo"}),
    "fixed length": ({"loss_aggregation": "seq-mean-token-sum-norm"}, {"loss_type": "dr_grpo"}),
    "token sum": ({"loss_aggregation": "seq-mean-token-sum"}, {"loss_type": "luspo"}),
    "kl": (
        {"loss_aggregation": "seq-mean-token-mean", "kl_coef": 0.3, "kl_estimator": "k3"},
        {"loss_type": "grpo", "beta": 0.3},
    ),
    "entropy": ({"entropy_coef": 0.2}, {"loss_type": "bnpo", "entropy_coef": 0.2}),
    "gspo": (
        {"policy_loss": "gspo", "clip_low": 0.02, "clip_high": 0.03, "loss_aggregation": "seq-mean-token-mean"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
    ),
    "cispo": ({"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    "sapo": ({"policy_loss": "sapo", "loss_aggregation": "seq-mean-token-mean"}, {"loss_type": "sapo"}),
}


@pytest.mark.parametrize("case", GRPO_CASES)
def test_grpo(peer_grpo: PeerGRPO, sampled: dict[str, Tensor], case: str) -> None:
    """TRL's names: "dapo" and "bnpo" are rlkit's token-mean (of the whole batch, of what one pass sees), "grpo" is
    seq-mean-token-mean, "dr_grpo" the fixed length, "luspo" seq-mean-token-sum; `delta` bounds the ratio of every token
    from above, which only shows where the advantage is negative, as the dual clip does; its "cispo" bound is the
    largest weight itself, not its distance from 1. Entropy is a mean over tokens there whatever the loss, so it is
    compared under token-mean. Its KL term is k3, weighed with the ratio to the old policy unless
    `use_bias_correction_kl` is off; rlkit's is not weighed.
    """
    config, peer = GRPO_CASES[case]
    updates, metrics = grpo_step(sampled, **config)
    if "train/clip_fraction" in metrics:
        assert 0.05 < metrics["train/clip_fraction"] < 0.95
    agree(updates, *peer_grpo_step(peer_grpo, sampled, **peer))


def test_grpo_clips_the_same_tokens(peer_grpo: PeerGRPO, sampled: dict[str, Tensor]) -> None:
    """Both count tokens whose clipped term decides; some are clipped on either side."""
    metrics = grpo_step(sampled)[1]
    peer_grpo._metrics["eval"].clear()
    peer_grpo_step(peer_grpo, sampled)
    peers = peer_grpo._metrics["eval"]
    assert peers["clip_ratio/low_mean"][0] > 0.01
    assert peers["clip_ratio/high_mean"][0] > 0.01
    assert metrics["train/clip_fraction"] == pytest.approx(peers["clip_ratio/region_mean"][0], rel=TOLERANCE)
    assert metrics["train/entropy"] == pytest.approx(peers["entropy"][0], rel=TOLERANCE)


def test_grpo_default_kl_has_the_value_of_trls_and_an_unbiased_gradient(
    peer_grpo: PeerGRPO, sampled: dict[str, Tensor]
) -> None:
    """rlkit's GRPO takes "k3+": TRL's k3 as a number, but with d = log p - log q its gradient is that of d^2 / 2, the
    exact gradient of KL(p || q) in expectation, where k3's own is that of KL(q || p). So the loss is TRL's, and the
    gradient is TRL's without a KL term plus that of coef mean(d^2 / 2), taken here by a plain forward.
    """
    updates, _ = grpo_step(sampled, kl_coef=0.3)
    loss, _ = peer_grpo_step(peer_grpo, sampled, beta=0.3)
    _, without = peer_grpo_step(peer_grpo, sampled)
    model, mask = tiny_model(0), sampled["completion_mask"]
    ids = torch.cat([sampled["prompt_ids"], sampled["completion_ids"]], dim=1)
    attended = torch.cat([sampled["prompt_mask"], mask], dim=1)
    logits = model(ids, attention_mask=attended).logits[:, sampled["prompt_ids"].shape[1] - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, sampled["completion_ids"][..., None]).squeeze(-1)
    square = (logprobs - sampled["ref_per_token_logps"]).square() / 2
    (0.3 * (square * mask).sum() / mask.sum()).backward()
    agree(updates, loss, without + flat_gradient(list(model.parameters())))


@pytest.mark.parametrize("scale", ["group", "none"])
def test_advantages_of_the_same_rewards(peer_grpo: PeerGRPO, scale: str) -> None:
    """Group-relative advantages, centred (Dr.GRPO) or also divided by the group's deviation (GRPO). TRL adds 1e-4 to
    the deviation, rlkit 1e-6, so rlkit's are larger by (std + 1e-4) / (std + 1e-6).
    """
    peer_grpo.scale_rewards = scale
    torch.manual_seed(2)
    inputs = peer_grpo._generate_and_score_completions([{"prompt": text} for text in PROMPTS for _ in range(4)])
    mask = inputs["completion_mask"].bool()
    rewards = torch.tensor(words(tiny_tokenizer().batch_decode(inputs["completion_ids"], skip_special_tokens=True)))
    batch = RolloutBatch(
        {
            "response_mask": mask,
            "rewards": rewards,
            "reward_valid": torch.ones(12, dtype=torch.bool),
            "groups": torch.arange(3).repeat_interleave(4),
            "finish_reasons": ["stop"] * 12,
        }
    )
    wanted = inputs["advantages"]
    if scale == "group":
        std = rewards.view(3, 4).std(1).repeat_interleave(4)
        wanted = wanted * (std + 1e-4) / (std + 1e-6)
    assert wanted.abs().max() > 0.5
    advantages = CriticFreeAdvantages(grpo(scale_by_std=scale == "group")).run(batch)["advantages"]
    torch.testing.assert_close(advantages, wanted[:, None] * mask, rtol=TOLERANCE, atol=1e-6)
