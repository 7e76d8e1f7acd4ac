"""PPO one phase after another, as it is written first: the baseline that `step.py` compares rlkit's PPO with.

Four models in float32 under bf16 autocast; `generate` samples all rows at once; every phase reads its input from host
memory and leaves its output there; batches are padded; log-probs of the old policy, the reference and the critic take a
forward each.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from shapes import model_of
from torch import Tensor, nn

from rlkit.algorithms.distributions import token_logprobs
from rlkit.algorithms.kl import kl_estimate
from rlkit.algorithms.masked import masked_whiten
from rlkit.algorithms.policy_losses import ppo_clip_loss
from rlkit.algorithms.returns import gae
from rlkit.algorithms.value_losses import clipped_value_loss


class SequentialPPO:
    """One update a step on fixed prompts and responses of a fixed length.

    Args:
        shape, layers: of all four models.
        ids: (B, P) prompts on the host.
        response: tokens of a response.
        micro: rows of a forward.
        device: where the models are.
    """

    def __init__(self, shape: str, layers: int | None, ids: Tensor, response: int, micro: int, device: str) -> None:
        self.actor, self.critic, self.reward, self.reference = (
            model_of(shape, device, torch.float32, layers) for _ in range(4)
        )
        width = self.actor.config.hidden_size
        self.value_head, self.reward_head = (nn.Linear(width, 1).to(device) for _ in range(2))
        self.ids, self.response, self.micro, self.device = ids, response, micro, device
        self.seconds = {"sampling": 0.0, "scoring": 0.0, "update": 0.0}
        trained = [*self.actor.parameters(), *self.critic.parameters(), *self.value_head.parameters()]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def step(self, rows: int | None = None) -> None:
        """Sample, score with three models, estimate, update; for some of the rows, where given."""
        ids = self.ids[:rows]
        began = time.perf_counter()
        with self._autocast(), torch.no_grad():
            full = self._sample(ids.to(self.device)).cpu()
            sampled = time.perf_counter()
            old = self._over(lambda rows: self._logprobs(self.actor, rows), full)
            reference = self._over(lambda rows: self._logprobs(self.reference, rows), full)
            values = self._over(self._values, full)
            rewards = self._over(self._score, full)
        scored = time.perf_counter()
        mask = torch.ones_like(old, dtype=torch.bool)
        token_rewards = -0.04 * kl_estimate(old, reference, "k1")
        token_rewards[:, -1] += rewards
        advantages, returns = gae(token_rewards, values, mask, 1.0, 0.95)
        advantages = masked_whiten(advantages, mask)
        parts = (full, old, values, advantages, returns)
        for rows in zip(*(torch.split(part, self.micro) for part in parts), strict=True):
            self._backward(*(part.to(self.device) for part in rows))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ended = time.perf_counter()
        self.seconds = {"sampling": sampled - began, "scoring": scored - sampled, "update": ended - scored}

    def _backward(self, full: Tensor, old: Tensor, values: Tensor, advantages: Tensor, returns: Tensor) -> None:
        mask = torch.ones_like(old, dtype=torch.bool)
        share = len(full) / len(self.ids)
        with self._autocast():
            logprobs, now = self._logprobs(self.actor, full), self._values(full)
        policy, _ = ppo_clip_loss(logprobs, old, advantages, mask, 0.2, 0.2)
        value, _ = clipped_value_loss(now, values, returns, mask, 0.2)
        (share * (policy.mean() + 0.5 * value.mean())).backward()

    def _over(self, phase: Any, rows: Tensor) -> Tensor:
        """A phase on micro-batches that come from the host and go back to it."""
        return torch.cat([phase(part.to(self.device)).cpu() for part in torch.split(rows, self.micro)])

    def _sample(self, ids: Tensor) -> Tensor:
        size = {"max_new_tokens": self.response, "min_new_tokens": self.response}
        out: Tensor = self.actor.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, **size)
        return out

    def _logprobs(self, model: Any, full: Tensor) -> Tensor:
        logits = model(full, use_cache=False).logits[:, -self.response - 1 : -1]
        return token_logprobs(logits, full[:, -self.response :])

    def _states(self, model: Any, full: Tensor) -> Tensor:
        states: Tensor = model.model(full, use_cache=False).last_hidden_state
        return states[:, -self.response - 1 : -1]

    def _values(self, full: Tensor) -> Tensor:
        return self.value_head(self._states(self.critic, full)).squeeze(-1).float()

    def _score(self, full: Tensor) -> Tensor:
        return self.reward_head(self._states(self.reward, full)[:, -1]).squeeze(-1).float()

    def _autocast(self) -> Any:
        return torch.autocast(self.device, torch.bfloat16)
