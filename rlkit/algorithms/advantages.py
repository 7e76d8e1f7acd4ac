"""Rewards per token, and advantages from them: the one place to import them from.

| Function | Gives | From | Method |
|---|---|---|---|
| `place_rewards` | token rewards (B, T) | reward on the last token, KL penalty on each | Ziegler et al. 2019 |
| `overlong_penalty` | (B,) | length near the limit | DAPO |
| `gae` | advantages, returns (B, T) | token rewards and a critic | PPO |
| `reinforce_plus_plus_advantages` | advantages, returns (B, T) | token rewards, whitened | REINFORCE++ |
| `remax_advantages` | advantages, returns (B, T) | token rewards against the greedy response's | ReMax |
| `group_advantages` | (B,) | group mean and deviation | GRPO, Dr. GRPO |
| `rloo_advantages` | (B,) | mean of the others in the group | RLOO |
| `reinforce_plus_plus_baseline_advantages` | (B, T) | group mean, whitened | REINFORCE++-baseline |
| `gpg_advantages` | (B,) | group mean, scaled by the share of useful responses | GPG |
| `passk_advantages` | (B,) | lead of the best over the second best | pass@k |
| `gdpo_advantages` | (B, T) | every reward term against its own group | GDPO |

Degenerate groups have one rule everywhere, and what it gives is always finite:

- no spread (all rewards of the group are the same number): exactly 0;
- a group of one: 0. With `singleton="raw"` its mean is taken to be 0 and its deviation 1, so it gets its own reward.
  A method that compares within a group learns nothing from such groups; use a group size of 2 or more;
- rows that `valid` leaves out count nowhere, so a group may shrink to one or none, and they get 0;
- whitening over a single token, or without spread, gives 0.
"""

from rlkit.algorithms.baselines import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    passk_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from rlkit.algorithms.returns import (
    gae,
    overlong_penalty,
    place_rewards,
    reinforce_plus_plus_advantages,
    remax_advantages,
)

__all__ = [
    "gae",
    "gdpo_advantages",
    "gpg_advantages",
    "group_advantages",
    "overlong_penalty",
    "passk_advantages",
    "place_rewards",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "rloo_advantages",
]
