"""Curricula inside trainers: stages that move by what was reached, rewards of a stage, live changes, resuming."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlkit.controllers.actor import ActorController
from rlkit.controllers.reward import RewardController
from rlkit.curriculum import Curriculum, Reaches, Stage, Steps
from rlkit.errors import CheckpointError, ConfigError, RequestRefused, RewardError
from rlkit.trainers.grpo import GRPOTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trainers.toys import CONFIG, good, short

POOLS = {"easy": ["the film was", "food was a"], "hard": ["the day is", "it is not so", "a very bad day"]}
BY_RATE = Reaches("curriculum/easy_pass_rate", 0.9, for_steps=2)


def easy_passes(response: str, pool: str = "none") -> float:
    """Whatever the response is, an easy prompt is passed and a hard one is not; the length breaks ties."""
    return (1.0 if pool == "easy" else 0.0) + 0.01 * len(response.split())


def trainer_of(stages: list[Stage], reward: Any = easy_passes, seed: int = 0, **config: Any) -> GRPOTrainer:
    actor = ActorController(tiny_model(), tiny_tokenizer())
    options = {**CONFIG, "batch_size": 8, "group_size": 2, "seed": seed, **config}
    return GRPOTrainer(actor, reward, prompts=Curriculum(POOLS, stages), config=options)


def two_stages(until: Any = BY_RATE) -> list[Stage]:
    return [Stage("warm-up", {"easy": 1.0}, until=until), Stage("both", {"easy": 1.0, "hard": 1.0})]


def pools_of(rollouts: dict[str, Any]) -> set[str]:
    return {pool for pool, prompts in POOLS.items() for prompt in rollouts["prompt"] if prompt in prompts}


def same_weights(a: GRPOTrainer, b: GRPOTrainer) -> bool:
    first, second = (trainer.actor.model.state_dict() for trainer in (a, b))
    return all(torch.equal(first[name], second[name]) for name in first)


# Stages and metrics


def test_a_stage_ends_when_its_pool_is_passed() -> None:
    trainer = trainer_of(two_stages())
    results = [trainer.step() for _ in range(4)]
    # Passed in steps 1 and 2; so step 3 is the first of the next stage.
    assert [result.metrics["curriculum/stage"] for result in results] == [0.0, 0.0, 1.0, 1.0]
    assert [result.metrics["curriculum/stage_steps"] for result in results] == [0.0, 1.0, 0.0, 1.0]
    assert [result.metrics["curriculum/hard_share"] for result in results] == [0.0, 0.0, 0.5, 0.5]
    assert pools_of(results[0].rollouts) == pools_of(results[1].rollouts) == {"easy"}
    assert pools_of({"prompt": results[2].rollouts["prompt"] + results[3].rollouts["prompt"]}) == {"easy", "hard"}
    assert trainer.prompts.history()[1:] == [
        {
            "step": 2,
            "from": "warm-up",
            "to": "both",
            "reason": "curriculum/easy_pass_rate at or above 0.9 for 2 steps",
        }
    ]
    assert trainer.step().metrics["curriculum/easy_pass_rate"] == 1.0
    assert trainer.step().metrics["curriculum/hard_pass_rate"] == 0.0


def test_a_stage_comes_back_when_the_mean_reward_falls() -> None:
    # The mean reward is at least 1 on easy prompts and at most 0.06 on hard ones.
    stages = [
        Stage("easy", {"easy": 1.0}, until=Reaches(None, 0.9, falls_back_below=0.5)),
        Stage("hard", {"hard": 1.0}),
    ]
    trainer = trainer_of(stages)
    moved = [trainer.step().metrics["curriculum/stage"] for _ in range(5)]
    assert moved == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert [(entry["step"], entry["to"]) for entry in trainer.prompts.history()] == [
        (0, "easy"), (1, "hard"), (2, "easy"), (3, "hard"), (4, "easy"), (5, "hard"),
    ]  # fmt: skip


def test_a_step_that_fails_draws_the_same_prompts_again() -> None:
    def failing(responses: list[str]) -> list[float]:
        if trainer.global_step == 1 and not failed:
            failed.append(True)
            raise ValueError("the scoring service is down")
        return good(responses)

    failed: list[bool] = []
    stages = [Stage("both", {"easy": 1.0, "hard": 1.0})]
    trainer, twin = trainer_of(stages, failing), trainer_of(stages, good)
    trainer.step()
    with pytest.raises(Exception, match="the scoring service is down"):
        trainer.step()
    assert failed
    twin.step()
    assert trainer.step().rollouts == {
        ("reward/failing" if name == "reward/good" else name): column for name, column in twin.step().rollouts.items()
    }
    assert same_weights(trainer, twin)


# Rewards of a stage


def staged_rewards() -> list[Stage]:
    return [
        Stage("own", {"easy": 1.0}, until=Steps(2)),
        Stage("mixed", {"easy": 1.0}, until=Steps(2), rewards=[(good, 0.75), (short, 0.25)]),
        Stage("own again", {"easy": 1.0, "hard": 1.0}),
    ]


def test_a_stage_has_its_own_rewards_and_gives_them_back() -> None:
    trainer = trainer_of(staged_rewards())
    results = [trainer.step() for _ in range(5)]
    terms = [{name for name in result.rollouts if name.startswith("reward/")} for result in results]
    own, mixed = {"reward/easy_passes"}, {"reward/good", "reward/short"}
    assert terms == [own, own, mixed, mixed, own]
    table = results[2].rollouts
    by_hand = [0.75 * good([text])[0] + 0.25 * short(text) for text in table["response"]]
    assert table["reward"] == pytest.approx(by_hand, abs=1e-6)
    assert trainer.settings()["reward_weights"] == {"easy_passes": 1.0}


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_training_resumes_bit_for_bit_across_a_change_of_rewards(at: int) -> None:
    # After steps 2 and 4 the stage has just changed, and the next step is the first with the other rewards.
    straight, first, second = (trainer_of(staged_rewards(), seed=seed) for seed in (0, 0, 5))
    for _ in range(6):
        expected = straight.step()
    for _ in range(at):
        first.step()
    second.load_state_dict(first.state_dict())
    for one in (first, second):
        while one.global_step < 6:
            result = one.step()
        assert result.rollouts == expected.rollouts
        assert same_weights(one, straight)
        assert one.prompts.history() == straight.prompts.history()


def test_weights_that_were_set_are_there_again_after_a_stage_with_other_rewards() -> None:
    def build() -> GRPOTrainer:
        return trainer_of(staged_rewards(), {"good": good, "short": short})

    straight, resumed = build(), build()
    straight.set(reward_weights={"short": 0.5})
    for _ in range(3):
        straight.step()
    assert straight.settings()["reward_weights"] == {"good": 0.75, "short": 0.25}
    straight.set(reward_weights={"short": 0.125})
    resumed.load_state_dict(straight.state_dict())
    assert resumed.settings()["reward_weights"] == {"good": 0.75, "short": 0.125}
    for trainer in (straight, resumed):
        for _ in range(2):
            trainer.step()
        assert trainer.settings()["reward_weights"] == {"good": 1.0, "short": 0.5}
    assert same_weights(straight, resumed)


def test_a_function_of_the_step_decides_before_a_stage_does() -> None:
    first, second = RewardController(good), RewardController(short)
    trainer = trainer_of(staged_rewards())
    trainer.set_reward_controller(lambda step: first if step < 3 else second)
    terms = [next(name for name in trainer.step().rollouts if name.startswith("reward/")) for _ in range(5)]
    assert terms == ["reward/good"] * 3 + ["reward/short"] * 2


def test_a_saved_state_must_be_of_the_same_kind_of_stage() -> None:
    trainer = trainer_of(staged_rewards())
    own = trainer.state_dict()["reward_weights"]
    assert own == {"weights": {"weights": {"easy_passes": 1.0}}, "own": None}
    for _ in range(2):
        trainer.step()
    staged = trainer.state_dict()["reward_weights"]
    assert staged == {
        "weights": {"weights": {"good": 0.75, "short": 0.25}},
        "own": {"weights": {"easy_passes": 1.0}},
    }
    for wrong, reason in (
        ({"weights": staged["weights"]}, "hold weights and own, given"),
        ({**staged, "own": None}, "are None, but the rewards in force .good, short. are those of a stage"),
        ({**staged, "own": staged["weights"]}, "given terms"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            trainer.terms.load_state_dict(wrong)
    assert trainer.terms.state_dict() == staged


def test_a_jump_to_a_stage_whose_rewards_cannot_be_used_is_refused() -> None:
    stages = [
        Stage("own", {"easy": 1.0}, until=Steps(50)),
        Stage("odd", {"easy": 1.0}, rewards=[good, good]),
    ]
    trainer, twin = trainer_of(stages, good), trainer_of(stages, good)
    for _ in range(2):
        with pytest.raises(RewardError, match="two reward terms are named 'good'"):
            trainer.set(lr=1e-5, curriculum={"stage": "odd"})
    assert trainer.settings() == twin.settings()
    assert trainer.step().rollouts == twin.step().rollouts


# Live


def test_settings_specs_and_the_description_know_the_curriculum() -> None:
    trainer = trainer_of(two_stages())
    assert trainer.settings()["curriculum"] == {
        "stage": "warm-up",
        "pool_weights": {"easy": 1.0, "hard": 0.0},
        "hold": False,
        "until": {
            "warm-up": {
                "metric": "curriculum/easy_pass_rate",
                "value": 0.9,
                "for_steps": 2,
                "falls_back_below": None,
                "smoothing": 0.0,
            }
        },
    }
    assert trainer.setting_specs()["curriculum"]["type"] == "curriculum"
    described = trainer.describe()["curriculum"]
    assert described["pools"] == {"easy": 2, "hard": 3}
    assert [stage["name"] for stage in described["stages"]] == ["warm-up", "both"]
    plain = GRPOTrainer(
        ActorController(tiny_model(), tiny_tokenizer()), good, prompts=POOLS["easy"], config={**CONFIG, "group_size": 2}
    )
    assert "curriculum" not in {**plain.settings(), **plain.setting_specs(), **plain.describe()}
    with pytest.raises(ConfigError, match="curriculum"):
        plain.set(curriculum={"stage": "both"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lr": 1e-5, "curriculum": {"stage": "nope"}}, "nope"),
        ({"curriculum": {"stage": "both"}, "lr": -1.0}, "lr"),
        ({"curriculum": {"stage": "both"}, "kl_coef": 0.1}, "needs a reference"),
        ({"reward_weights": {"easy_passes": 0.5}, "curriculum": {"pool_weights": {"easy": 0.0}}}, "positive weight"),
        ({"curriculum": {"stage": "both", "hold": True}, "reward_weights": {"easy_pases": 1.0}}, "easy_pases"),
    ],
)
def test_a_change_is_made_with_all_others_or_not_at_all(changes: dict[str, Any], reason: str) -> None:
    trainer = trainer_of(two_stages())
    trainer.step()
    settings, prompts = trainer.settings(), trainer.prompts.state_dict()
    with pytest.raises(ConfigError, match=reason):
        trainer.set(**changes)
    assert trainer.settings() == settings
    assert trainer.prompts.state_dict() == prompts


def test_changes_take_effect_with_the_next_prompts() -> None:
    trainer = trainer_of(two_stages(Steps(50)))
    assert pools_of(trainer.step().rollouts) == {"easy"}
    trainer.set(curriculum={"pool_weights": {"easy": 0.0, "hard": 1.0}}, lr=1e-4)
    result = trainer.step()
    assert pools_of(result.rollouts) == {"hard"}
    assert result.metrics["train/lr"] == 1e-4
    trainer.set(curriculum={"pool_weights": None, "until": {"warm-up": {"steps": 3}}})
    assert pools_of(trainer.step().rollouts) == {"easy"}
    assert trainer.settings()["curriculum"]["stage"] == "both"


def test_evaluation_leaves_the_curriculum_where_it_stands() -> None:
    trainer, twin = trainer_of(two_stages()), trainer_of(two_stages())
    for one in (trainer, twin):
        one.step()
    assert len(trainer.evaluate(POOLS["hard"], count=3).rewards) == 6
    trainer.evaluate()
    assert trainer.prompts.state_dict() == twin.prompts.state_dict()
    for _ in range(2):
        assert trainer.step().rollouts == twin.step().rollouts


def test_a_run_is_moved_to_another_stage_and_comes_back(tmp_path: Any) -> None:
    trainer = trainer_of(two_stages(Steps(10_000)))
    run = trainer.start(str(tmp_path / "exp"))
    change = run.set(curriculum={"stage": "both", "pool_weights": {"hard": 3.0}}, lr=1e-4).wait()
    with pytest.raises(RequestRefused, match="bth.*did you mean 'both'"):
        run.set(curriculum={"stage": "bth"}, lr=1e-5).wait()
    assert (run.settings["curriculum"]["stage"], run.settings["lr"]) == ("both", 1e-4)
    run.wait_for_step(change.step + 2)
    run.stop()
    assert run.load() is trainer
    table = run.metrics.loc[change.step + 1 :]
    assert set(table["curriculum/hard_share"]) == {0.75}
    assert set(run.metrics.loc[: change.step, "curriculum/stage"]) <= {0.0}
    assert trainer.settings()["curriculum"]["pool_weights"] == {"easy": 1.0, "hard": 3.0}
    assert trainer.prompts.history()[1:] == [
        {"step": change.step, "from": "warm-up", "to": "both", "reason": "set by hand"}
    ]
    assert trainer.step().metrics["curriculum/stage"] == 1.0
