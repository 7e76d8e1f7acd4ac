"""One step: what it learns, what it leaves alone, and what happens when something goes wrong in it."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from rlkit.algorithms.kl import kl_estimate
from rlkit.controllers.actor import ActorController
from rlkit.controllers.base import Controller
from rlkit.controllers.critic import CriticController
from rlkit.dataflow import Dataflow
from rlkit.errors import ConfigError, DataflowError, ModelError, RewardError
from rlkit.fields import Field
from rlkit.trainers.ppo import PPOTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.toys import CONFIG, PROMPTS, good, grpo, ppo, short


def parameters(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.actor.model.parameters()])


def test_a_failing_reward_leaves_the_step_to_be_taken_again():
    broken = True

    def sometimes(responses):
        if broken:
            raise ValueError("no network")
        return good(responses)

    trainer, other = ppo(reward=sometimes), ppo(reward=good)
    before = parameters(trainer).clone()
    with pytest.raises(RewardError, match="sometimes.*no network"):
        trainer.step()
    assert torch.equal(parameters(trainer), before)
    assert trainer.global_step == 0
    broken = False
    result, expected = trainer.step(), other.step()
    assert result.rollouts["response"] == expected.rollouts["response"]
    assert torch.equal(parameters(trainer), parameters(other))


def test_r24_an_exception_kept_by_the_notebook_keeps_no_batch_alive():
    seen = []

    def failing(responses):
        raise ValueError("stop")

    trainer = ppo(reward=failing)
    draw = trainer.draw
    trainer.draw = lambda: [seen.append(weakref.ref(batch := draw())), batch][1]
    with pytest.raises(RewardError) as caught:
        trainer.step()
    assert caught.value.__traceback__ is not None
    gc.collect()
    assert seen[0]() is None


def test_the_total_optimised_is_the_total_shown_and_raw_terms_are_kept():
    trainer = ppo(reward={"good": good, "short": (short, 0.5)})
    table = trainer.step().rollouts
    for i, total in enumerate(table["reward"]):
        assert total == pytest.approx(table["reward/good"][i] + 0.5 * table["reward/short"][i], abs=1e-6)
        assert table["reward/good"][i] == pytest.approx(table["response"][i].split().count("good") / 6)
    trainer.set(reward_weights={"short": 0.0})
    table = trainer.step().rollouts
    assert table["reward"] == pytest.approx(table["reward/good"])
    assert any(table["reward/short"])


def test_adaptive_kl_moves_the_coefficient_and_keeps_it_in_the_state():
    trainer = ppo(reference=True, kl_coef=0.1, kl_target=1e-6, kl_horizon=100)
    for _ in range(3):
        trainer.step()
    assert trainer.config.kl_coef > 0.1
    twin = ppo(reference=True, kl_coef=0.1, kl_target=1e-6, kl_horizon=100)
    twin.load_state_dict(trainer.state_dict())
    assert twin.config.kl_coef == trainer.config.kl_coef
    assert (twin.step(), twin.config.kl_coef)[1] == (trainer.step(), trainer.config.kl_coef)[1]


def test_kl_metric_is_the_estimate_over_real_tokens():
    trainer = ppo(reference=True)
    trainer.step()
    batch = trainer.evaluate()
    kl = (kl_estimate(batch.logprobs, batch.ref_logprobs, "k3") * batch.response_mask).sum() / batch.response_mask.sum()
    trainer.step()
    assert math.isfinite(float(kl))
    assert float(kl) > 0


def test_bad_combinations_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="group of one always has advantage 0"):
        grpo(group_size=1)
    with pytest.raises(ConfigError, match="kl_coef=0.1 needs a reference"):
        ppo(kl_coef=0.1)
    with pytest.raises(ConfigError, match=r"did you mean 'batch_size'\?"):
        ppo(batchsize=4)
    with pytest.raises(ConfigError, match=r"reward term 'shrt'; did you mean 'short'\?"):
        ppo(reward={"good": good, "short": short}, reward_weights={"shrt": 1.0})
    with pytest.raises(RewardError, match="two reward terms are named 'good'"):
        ppo(reward=[good, good])
    with pytest.raises(RewardError, match="'mean' is the name of a metric"):
        ppo(reward={"mean": good})
    with pytest.raises(RewardError, match="at least one reward"):
        ppo(reward=[])
    actor = ActorController(tiny_model(), tiny_tokenizer())
    with pytest.raises(ModelError, match="have different tokenizers"):
        PPOTrainer(
            actor, CriticController(tiny_model(1, vocab_size=64), tiny_tokenizer(extra=30)), good, prompts=PROMPTS
        )
    with pytest.raises(ModelError, match="either a model of its own"):
        CriticController()


def test_live_settings_change_together_or_not_at_all():
    trainer = ppo(reward={"good": good, "short": short})
    with pytest.raises(ConfigError, match="unknown reward term 'god'"):
        trainer.set(lr=1.0, reward_weights={"god": 2.0})
    assert trainer.settings()["lr"] == CONFIG["lr"]
    with pytest.raises(ConfigError, match="kl_coef=0.5 needs a reference"):
        trainer.set(kl_coef=0.5)
    with pytest.raises(ConfigError, match="batch_size is fixed"):
        trainer.set(batch_size=4)
    with pytest.raises(ConfigError, match="finite"):
        trainer.set(reward_weights={"good": math.nan})
    trainer.set(lr=1e-4, reward_weights={"good": 2.0})
    assert trainer.settings()["lr"] == 1e-4
    assert trainer.settings()["reward_weights"] == {"good": 2.0, "short": 1.0}
    assert trainer.step().metrics["train/lr"] == pytest.approx(1e-4)


def test_a_users_optimizer_keeps_its_class_and_settings():
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.5, 0.9))
    actor = ActorController(model, tiny_tokenizer(), optimizer=optimizer)
    trainer = PPOTrainer(
        actor, CriticController(trunk=actor), good, prompts=PROMPTS, config={"batch_size": 4, "max_new_tokens": 4}
    )
    assert trainer.settings()["lr"] == 5e-4
    first = trainer.learner.engines["policy"].optimizer.param_groups[0]
    assert (type(trainer.learner.engines["policy"].optimizer), first["betas"]) == (torch.optim.AdamW, (0.5, 0.9))
    assert trainer.step().metrics["train/lr"] == pytest.approx(5e-4)


def test_a_controller_of_ones_own_joins_the_dataflow():
    class Counter(Controller):
        role = "counter"
        reads = ("responses",)
        writes = (Field("words", ("B",), "float32", "words in the response"),)

        def __init__(self):
            super().__init__("counter")
            self.calls = 0

        def run(self, batch):
            self.calls += 1
            return {"words": torch.tensor([float(len(text.split())) for text in batch.responses])}

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    counter = Counter()
    actor = ActorController(tiny_model(), tiny_tokenizer())
    flow = Dataflow().connect(actor.output, counter.input)
    trainer = PPOTrainer(actor, CriticController(trunk=actor), good, prompts=PROMPTS, config=CONFIG, dataflow=flow)
    trainer.step()
    assert counter.calls == 1
    assert len(flow) == 2  # the user's own graph is left alone
    assert trainer.state_dict()["controllers"]["counter"] == {"calls": 1}
    assert {node["name"] for node in trainer.dataflow_json()["nodes"]} >= {"actor", "critic", "counter", "good"}


def test_two_controllers_of_one_name_are_refused():
    actor = ActorController(tiny_model(), tiny_tokenizer())
    with pytest.raises(DataflowError, match="critic"):
        PPOTrainer(
            actor, CriticController(trunk=actor), {"critic": good}, prompts=PROMPTS, config={"max_new_tokens": 4}
        )


def test_r33_a_non_finite_gradient_leaves_weights_and_moments_alone_and_stops_in_the_end():
    from rlkit.engines.train import NonFiniteGradientsError

    trainer = ppo(max_bad_steps=2)
    trainer.step()
    before = parameters(trainer).clone()
    moments = trainer.learner.state_dict()["engines"]["policy"]["optimizer"]["actor.model.norm.weight"][
        "exp_avg"
    ].clone()
    poison = next(trainer.actor.model.parameters()).register_hook(lambda grad: grad * math.nan)
    assert trainer.step().metrics["train/skipped_updates"] == 1.0
    assert torch.equal(parameters(trainer), before)
    after = trainer.learner.state_dict()["engines"]["policy"]["optimizer"]["actor.model.norm.weight"]["exp_avg"]
    assert torch.equal(after, moments)
    with pytest.raises(NonFiniteGradientsError, match="2 updates in a row"):
        trainer.step()
    poison.remove()
    assert trainer.step().metrics["train/skipped_updates"] == 0.0


def test_reward_controllers_can_be_exchanged_between_steps():
    from rlkit.controllers.reward import RewardController

    first, second = RewardController(good), RewardController(short)
    trainer = ppo()
    trainer.set_reward_controller(lambda step: first if step < 1 else second)
    assert "reward/good" in trainer.step().metrics
    metrics = trainer.step().metrics
    assert "reward/short" in metrics
    assert "reward/good" not in metrics
    trainer.set_multi_reward_controllers([(first, 0.75), (second, 0.25)])
    table = trainer.step().rollouts
    assert table["reward"] == pytest.approx(
        [0.75 * a + 0.25 * b for a, b in zip(table["reward/good"], table["reward/short"], strict=True)], abs=1e-6
    )
