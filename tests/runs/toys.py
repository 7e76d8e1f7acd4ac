"""Trainers of four numbers, quick enough for many steps in a test. Each step is deterministic in the state."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlkit.errors import CheckpointError, ConfigError
from rlkit.metrics import MetricsTracker
from rlkit.runs.protocol import StepResult

TARGET = (1.0, 2.0, 3.0, 4.0)


class PlainTrainer:
    """Pulls four numbers towards a target by gradient descent with momentum 0.9, in plain Python: loads no torch."""

    def __init__(
        self,
        *,
        delay_s: float = 0.01,
        fail_at: int | None = None,
        reward: Callable[[str], float] = len,
        checkpoint_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.weight, self.speed = [0.0] * 4, [0.0] * 4
        self.lr, self.temperature, self.limit = 0.1, 1.0, None
        self.reward_weights = {"brevity": 1.0, "joy": 0.5}
        self.global_step = 0
        self.delay_s, self.fail_at, self.reward = delay_s, fail_at, reward
        self.checkpoint_config = dict(checkpoint_config or {"save_interval": 5, "keep_last_k": 2})
        self.tracker = MetricsTracker()
        self.owner = ""

    def step(self) -> StepResult:
        if self.owner:
            raise RuntimeError(f"owned by {self.owner}")
        if self.fail_at is not None and self.global_step + 1 >= self.fail_at:
            raise ValueError("the toy broke")
        until = time.monotonic() + self.delay_s
        with self.tracker.span("learn"):
            loss = self.learn()
        while time.monotonic() < until:
            time.sleep(min(0.01, self.delay_s))
        self.global_step += 1
        self.tracker.add("train/loss", loss)
        self.tracker.add("train/strange", math.nan if self.global_step % 2 else math.inf)
        for name, weight in self.reward_weights.items():
            self.tracker.add(f"reward/{name}", weight)
        reduced = self.tracker.flush(self.global_step)
        response = "x" * self.global_step
        rollouts = {
            "row": [0, 1],
            "prompt": ["say", "tell"],
            "response": [response, response + "é"],
            "reward": [float(self.reward(response)), None],
            "columns": [{"a": 1}, {"b": [2]}],
        }
        return StepResult(self.global_step, reduced.metrics, reduced.spans, rollouts)

    def learn(self) -> Any:
        loss = 0.0
        for i, target in enumerate(TARGET):
            loss += (self.weight[i] - target) ** 2
            self.speed[i] = 0.9 * self.speed[i] + 2 * (self.weight[i] - target)
            self.weight[i] -= self.lr * self.speed[i]
        return loss

    def settings(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "temperature": self.temperature,
            "limit": self.limit,
            "reward_weights": dict(self.reward_weights),
        }

    def setting_specs(self) -> dict[str, dict[str, Any]]:
        return {"lr": {"type": "float", "min": 0.0, "max": None, "doc": "Learning rate."}}

    def set(self, **changes: Any) -> None:
        if changes.get("lr", 0.1) <= 0:
            raise ConfigError(f"lr must be above 0, got {changes['lr']}")
        if changes.get("temperature") == 13:
            raise ZeroDivisionError("thirteen")
        self.reward_weights.update(changes.pop("reward_weights", {}))
        for name, value in changes.items():
            setattr(self, name, value)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers(), "global_step": self.global_step, "settings": self.settings()}

    def numbers(self) -> dict[str, Any]:
        return {"weight": list(self.weight), "speed": list(self.speed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"numbers", "global_step", "settings"}:
            raise CheckpointError(f"the state does not fit: {sorted(state)}")
        self.load_numbers(state["numbers"])
        self.global_step = state["global_step"]
        self.set(**state["settings"])

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        self.weight, self.speed = list(numbers["weight"]), list(numbers["speed"])

    def frozen_state_dict(self) -> dict[str, Any]:
        return {}

    def load_frozen_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise CheckpointError(f"there is nothing frozen here, got {sorted(state)}")

    def describe(self) -> dict[str, Any]:
        return {"algorithm": "toy", "config": {"checkpoint_config": self.checkpoint_config}}

    def dataflow_json(self) -> dict[str, Any]:
        return {"nodes": [{"name": "toy", "role": "actor"}], "edges": []}

    def release(self, owner: str) -> None:
        self.weight, self.owner = [], owner

    def reclaim(self, state: Mapping[str, Any], frozen: Mapping[str, Any]) -> None:
        self.load_frozen_state_dict(frozen)
        self.load_state_dict(state)
        self.owner = ""

    def close(self) -> None:
        self.owner = "nobody"


def expected_weight(steps: int, lr: float = 0.1) -> list[float]:
    """The weight after some steps."""
    toy = PlainTrainer()
    toy.lr = lr
    for _ in range(steps):
        toy.learn()
    return toy.weight


def wait_for(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The first true value of `condition`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout_s} s in vain")


def repository() -> Path:
    """Root of the repository, which subprocesses import from."""
    return Path(__file__).parents[2]
