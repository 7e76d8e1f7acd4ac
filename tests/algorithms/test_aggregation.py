"""From token losses to one number: goldens by hand, refusals."""

import pytest
import torch

from rlkit.algorithms.aggregation import aggregate, token_weights
from rlkit.errors import ConfigError, DataError

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSSES, MASK = torch.tensor([[1.0, 1, 1, 1], [4, 99, 99, 99]]), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
BY_HAND = dict(zip(MODES, [1.6, 8.0, 4.0, 2.5, 8 / (2 * 10)], strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_by_hand(mode: str) -> None:
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
