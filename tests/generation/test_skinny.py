"""Batched blocks of a weight against the plain product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlkit.generation.skinny import SideBySide


class Scaled(nn.Linear):
    """A layer that is no plain linear layer, as adapters are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(
    ("heights", "biases"),
    [([64], [False]), ([10], [True]), ([130, 64, 1], [False, True, False]), ([63, 65], [True, True])],
)
def test_outputs_come_side_by_side(rows: int, heights: list[int], biases: list[bool]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(24, out, bias=bias) for out, bias in zip(heights, biases, strict=True)]
    x = torch.randn(rows, 24)
    with torch.no_grad():
        expected = torch.cat([layer(x) for layer in layers], dim=-1)
        torch.testing.assert_close(SideBySide(layers)(x), expected, atol=1e-5, rtol=1e-5)
        strided = torch.randn(24, rows).t()  # as results of earlier products are laid out
        expected = torch.cat([layer(strided) for layer in layers], dim=-1)
        torch.testing.assert_close(SideBySide(layers)(strided), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("threads", "heights", "blocks"),
    [
        (2, [576, 192, 1536], [(4, 144), (2, 96), (8, 192)]),  # of 288, 96 and 768 rows a thread
        (3, [576, 100], [(3, 192), (1, 64), (1, 36)]),
        (2, [2 * 197], [(6, 64), (1, 10)]),  # 197 is prime
    ],
)
def test_every_thread_gets_as_many_blocks(
    threads: int, heights: list[int], blocks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    made = SideBySide([nn.Linear(8, out, bias=False) for out in heights])
    assert [tuple(block.shape[:2]) for block in made.blocks] == blocks


def test_other_layers_are_called() -> None:
    layers = [nn.Linear(8, 70), Scaled(8, 5)]
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert torch.equal(SideBySide(layers)(x), torch.cat([layers[0](x), layers[1](x)], dim=-1))
        assert torch.equal(SideBySide(layers[1:])(x), layers[1](x))


def test_updates_in_place_are_seen() -> None:
    layer = nn.Linear(8, 100, bias=False)
    together = SideBySide([layer])
    x = torch.randn(2, 8)
    with torch.no_grad():
        layer.weight.mul_(2).add_(1)
        torch.testing.assert_close(together(x), layer(x), atol=1e-5, rtol=1e-5)
    assert all(
        block.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr() for block in together.blocks
    )
