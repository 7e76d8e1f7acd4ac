"""What a reward function is known by: a hash of its source that travels with it."""

import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

from rlkit.rewards import RewardFunction


def test_the_source_hash_changes_with_the_source_only() -> None:
    def first(response: str) -> float:
        return 1.0

    def second(response: str) -> float:
        return 2.0

    one, two = RewardFunction(first), RewardFunction(second)
    assert one.source_hash == RewardFunction(first, "other").source_hash != two.source_hash
    assert re.fullmatch("[0-9a-f]{16}", one.source_hash)
    assert RewardFunction(functools.partial(first)).source_hash == one.source_hash


def test_the_source_hash_does_without_source() -> None:
    def compiled(body: str) -> Callable[..., Any]:
        names: dict[str, Any] = {}
        exec(f"def reward(response):\n    return {body}", names)
        return names["reward"]  # type: ignore[no-any-return]

    assert RewardFunction(compiled("1")).source_hash == RewardFunction(compiled("1")).source_hash
    hashes = {RewardFunction(compiled(body)).source_hash for body in ("1", "2", "len(response)", "(lambda: 3)()")}
    assert len(hashes) == 4


def test_a_reward_function_travels_with_its_hash() -> None:
    reward = RewardFunction(len)
    copy = pickle.loads(pickle.dumps(reward))
    assert (copy.name, copy.source_hash, copy.batched) == (reward.name, reward.source_hash, reward.batched)
    assert copy.score(["p"], ["abc"], [{}]) == [3.0]
