"""From token losses to one number (R07): goldens by hand, a model's gradient under every split, refusals."""

import pytest
import torch
from torch import Tensor, nn

from rlkit.algorithms.aggregation import aggregate, token_weights
from rlkit.algorithms.distributions import logprobs_and_entropy
from rlkit.algorithms.kl import kl_estimate
from rlkit.algorithms.policy_losses import ppo_clip_loss
from rlkit.algorithms.value_losses import clipped_value_loss
from rlkit.errors import ConfigError, DataError

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSSES, MASK = torch.tensor([[1.0, 1, 1, 1], [4, 99, 99, 99]]), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
BY_HAND = dict(zip(MODES, [1.6, 8.0, 4.0, 2.5, 8 / (2 * 10)], strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_r07_by_hand(mode: str) -> None:
    assert aggregate(LOSSES, MASK, mode, fixed_length=10).item() == pytest.approx(BY_HAND[mode])
    weights = token_weights(MASK, mode, fixed_length=10)
    assert sum((LOSSES[i] * weights[i]).sum().item() for i in range(2)) == pytest.approx(BY_HAND[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_response_without_tokens_does_not_count(mode: str) -> None:
    losses, mask = torch.cat([LOSSES, LOSSES]), torch.cat([MASK, torch.zeros_like(MASK)])
    assert aggregate(losses, mask, mode, fixed_length=10).item() == pytest.approx(BY_HAND[mode])
    assert aggregate(losses[2:], mask[2:], mode, fixed_length=10).item() == 0.0


def test_what_the_mask_leaves_out_may_be_nan() -> None:
    losses = LOSSES.masked_fill(MASK == 0, float("nan"))
    assert aggregate(losses, MASK, "token-mean").item() == pytest.approx(1.6)


class Model(nn.Module):
    """A bigram language model with a value head: the smallest thing that has every loss term."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits, self.value = nn.Embedding(11, 11), nn.Embedding(11, 1)


def _objective(model: Model, batch: dict[str, Tensor], weights: Tensor, rows: list[int]) -> Tensor:
    """Policy + KL + entropy + value loss of some rows, with their share of the minibatch's weights."""
    part = {name: tensor[rows] for name, tensor in batch.items()}
    logprobs, entropy = logprobs_and_entropy(model.logits(part["before"]), part["ids"], 0.9)
    policy, _ = ppo_clip_loss(logprobs, part["old"], part["advantages"], part["mask"], 0.2, 0.3, 3.0)
    values = model.value(part["before"]).squeeze(-1)
    value, _ = clipped_value_loss(values, part["values"], part["returns"], part["mask"], 0.2)
    kl = kl_estimate(logprobs, part["reference"], "k3")
    return ((policy + 0.1 * kl - 0.05 * entropy + 0.5 * value) * weights[rows]).sum()


def _gradient(model: Model, batch: dict[str, Tensor], weights: Tensor, split: list[list[int]]) -> Tensor:
    model.zero_grad()
    for rows in split:
        _objective(model, batch, weights, rows).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("mode", MODES)
def test_r07_the_accumulated_gradient_is_that_of_one_batch(mode: str) -> None:
    rng = torch.Generator().manual_seed(3)
    rows, width = 9, 6
    batch = {name: torch.randint(11, (rows, width), generator=rng) for name in ("before", "ids")}
    for name in ("old", "reference", "advantages", "values", "returns"):
        batch[name] = torch.randn(rows, width, generator=rng) - (2.4 if name in ("old", "reference") else 0)
    lengths = torch.tensor([6, 1, 3, 2, 6, 5, 4, 1, 0])
    batch["mask"] = torch.arange(width) < lengths[:, None]
    weights, model = token_weights(batch["mask"], mode, fixed_length=width), Model()
    whole = _gradient(model, batch, weights, [list(range(8))])
    assert whole.norm() > 0.01
    splits = [
        [[i] for i in range(8)],
        [[0, 1], [2, 3, 4, 5, 6, 7]],
        [[5, 6, 7], [0, 1, 2, 3, 4]],
        [[8], [7, 3, 1], [8], [0, 2, 4, 5, 6]],
    ]
    for split in splits:
        parts = _gradient(model, batch, weights, split)
        assert (parts - whole).norm() / whole.norm() < 1e-5, split


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown loss aggregation 'mean'; expected one of token-mean"):
        token_weights(MASK, "mean")
    for length in (None, 0):
        with pytest.raises(ConfigError, match="needs fixed_length, the length limit of responses"):
            token_weights(MASK, "seq-mean-token-sum-norm", fixed_length=length)
    with pytest.raises(DataError, match="mask must have 2 dimension"):
        token_weights(MASK[0], "token-mean")
    with pytest.raises(DataError, match="mask must have the shape of token_loss"):
        aggregate(LOSSES, MASK[:1], "token-mean")
