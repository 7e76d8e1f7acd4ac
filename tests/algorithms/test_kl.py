"""What is refused as a KL estimate; values and gradients are those of requirement R05."""

import pytest
import torch

from rlkit.algorithms.kl import kl_estimate
from rlkit.errors import ConfigError, DataError

LOGPROBS = torch.tensor([0.2, -0.1, 0.0]).log_softmax(0)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown KL estimator 'k4'; expected one of k1, k2, k3"):
        kl_estimate(LOGPROBS, LOGPROBS, "k4")
    with pytest.raises(DataError, match="ref_logprobs must have the shape of logprobs"):
        kl_estimate(LOGPROBS, LOGPROBS[:2], "k1")
