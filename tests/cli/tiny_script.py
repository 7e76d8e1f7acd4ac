"""A user's file for `rlkit run`: PPO on a model made on the fly, with a reward written here."""

from rlkit import ActorController, CriticController, PPOTrainer
from tests.tiny import tiny_model, tiny_tokenizer


def goodness(response: str) -> float:
    return 1.0 if "good" in response else -0.1


def brevity(responses: list[str]) -> list[float]:
    return [-len(response.split()) / 10 for response in responses]


def make_trainer() -> PPOTrainer:
    actor = ActorController(tiny_model(), tiny_tokenizer())
    return PPOTrainer(
        actor=actor,
        reward_model={"goodness": goodness, "brevity": brevity},
        critic=CriticController(tiny_model(seed=1), tiny_tokenizer()),
        prompts=["the film was", "the food is"],
        config={"batch_size": 4, "max_new_tokens": 6, "lr": 1e-3, "threads": 1},
    )
