"""Reward terms: functions called with what their parameters ask for, their answers checked, and the terms mixed.

Loads no torch, so that a process which only calls reward functions starts quickly.
"""

from rlkit.rewards.caller import RewardCaller, Score
from rlkit.rewards.function import RewardFunction
from rlkit.rewards.length import overlong_penalty
from rlkit.rewards.weights import RewardWeights, mix

__all__ = ["RewardCaller", "RewardFunction", "RewardWeights", "Score", "mix", "overlong_penalty"]
