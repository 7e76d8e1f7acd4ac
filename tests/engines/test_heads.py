"""Value heads: how they start, where they read, how they are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlkit.engines.attention import packs
from rlkit.engines.heads import ValueHead, last_states, load_head, pool_last, save_head
from rlkit.errors import ModelError
from tests.generation.models import family_model


def test_a_fresh_head_expects_nothing_and_can_learn() -> None:
    head = ValueHead(8)
    states = torch.randn(3, 5, 8)
    values = head(states)
    assert values.shape == (3, 5)
    assert not values.any()
    values.sum().backward()
    assert torch.allclose(head.linear.weight.grad.squeeze(0), states.sum((0, 1)), atol=1e-4)


def test_values_are_fp32_whatever_the_states_are() -> None:
    head = ValueHead(8)
    torch.nn.init.ones_(head.linear.weight)
    states = torch.full((1, 1, 8), 1.0).bfloat16()
    assert head(states).dtype == torch.float32
    assert head(states).item() == 8


def test_pooling_reads_the_last_attended_position_and_no_token_value() -> None:
    """ids [1, 9, 2, 5, 6, 2] with pad = eos = 2 and every token real: position 5, not 4."""
    states = torch.arange(6.0).view(1, 6, 1)
    assert pool_last(states, torch.ones(1, 6, dtype=torch.bool)).item() == 5


@pytest.mark.parametrize("side", ["left", "right"])
def test_pooling_is_the_same_for_padding_on_either_side(side: str) -> None:
    states, filler = torch.randn(2, 4, 3), torch.randn(2, 2, 3)
    pads = torch.zeros(2, 2, dtype=torch.bool)
    real = torch.ones(2, 4, dtype=torch.bool)
    parts, masks = ([filler, states], [pads, real]) if side == "left" else ([states, filler], [real, pads])
    assert torch.equal(pool_last(torch.cat(parts, 1), torch.cat(masks, 1)), states[:, -1])


def test_pooling_handles_rows_of_several_lengths() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0]])
    states = torch.arange(16.0).view(4, 4, 1)
    assert pool_last(states, mask).flatten().tolist() == [1, 7, 8, 14]


def test_a_trained_head_comes_back_bit_for_bit(tmp_path: Path) -> None:
    head = ValueHead(16)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
    for _ in range(2):
        (head(torch.randn(4, 16)) - 1).square().sum().backward()
        optimizer.step()
    assert head.linear.weight.abs().min() > 0
    save_head(head, tmp_path)
    loaded = ValueHead(16)
    load_head(loaded, tmp_path)
    assert torch.equal(loaded.linear.weight, head.linear.weight)
    assert torch.equal(loaded.linear.bias, head.linear.bias)


def test_a_directory_without_a_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no value head .* new_head=True"):
        load_head(ValueHead(4), tmp_path)


def test_a_head_of_another_size_is_an_error(tmp_path: Path) -> None:
    save_head(ValueHead(4), tmp_path)
    head = ValueHead(8)
    with pytest.raises(ModelError, match="does not fit this model"):
        load_head(head, tmp_path)
    assert not head.linear.weight.any()


PACKED, PADDED = ("llama", "qwen2", "qwen3", "gpt2"), ("gemma2", "mistral-window")


@pytest.mark.parametrize(
    ("family", "left"), [(name, side) for name in PACKED for side in (False, True)] + [(name, False) for name in PADDED]
)
def test_the_last_state_is_that_of_each_row_alone(family: str, left: bool) -> None:
    trunk = family_model(family).base_model
    lengths = torch.tensor([5, 9, 1, 7])
    columns = torch.arange(9)
    mask = columns >= 9 - lengths[:, None] if left else columns < lengths[:, None]
    ids = torch.randint(3, 40, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    assert packs(trunk) is (family in PACKED)
    with torch.no_grad():
        alone = [trunk(input_ids=row[own][None]).last_hidden_state[0, -1] for row, own in zip(ids, mask, strict=True)]
        torch.testing.assert_close(last_states(trunk, ids, mask), torch.stack(alone), rtol=1e-4, atol=1e-5)
