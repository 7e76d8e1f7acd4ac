"""Attention of a decoding step beside the same written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlkit.kernels import attention
from tests.kernels.device import CLOSE, DEVICE, needs_kernels

pytestmark = needs_kernels


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "columns"), [(6, 2, 8, 40), (14, 2, 64, 300), (4, 4, 80, 200), (12, 2, 128, 500)]
)
@pytest.mark.parametrize("splits", [False, True])
def test_a_token_attends_over_its_row(
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    width: int,
    columns: int,
    splits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of unequal begin and place: neighbours of one prompt and of two, and one without a neighbour."""
    monkeypatch.setattr(attention, "_LEAST", 16 if splits else 10_000)
    rows, prompt = 7, columns // 3
    together = random(rows, (heads + 2 * key_heads) * width, dtype=dtype)
    query, key, value = together.split([n * width for n in (heads, key_heads, key_heads)], dim=-1)
    angle = random(columns, width // 2, seed=5).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    signed = torch.cat([-sin[:, : width // 2], sin[:, width // 2 :]], -1)
    stored = random(3, 2, rows, key_heads, columns, width, dtype=dtype, seed=2)[1]
    begin = torch.tensor([0, 3, 0, 0, 0, prompt - 1, 0], device=DEVICE)
    ends = [prompt, columns - 1, prompt + 5, columns - 2, columns // 2, prompt + 1, prompt + 3]
    place = torch.tensor(ends, device=DEVICE)
    source = torch.tensor([2, 1, 2, 2, 2, 5, 2], device=DEVICE)
    readers = [0, 3, 4, 6]
    prompt_end = torch.full((rows,), prompt, device=DEVICE)
    stored[:, readers, :, :prompt] = float("nan")  # nobody reads them
    whole = stored.clone()
    whole[:, readers, :, :prompt] = stored[:, 2:3, :, :prompt]
    where = begin, prompt_end, source, place

    arrivals = attention.no_arrivals(DEVICE)
    out = attention.attend_new_token(query, key, value, cos, signed, stored, *where, width**-0.5, arrivals)
    assert not arrivals.any()

    def turned(x: Tensor, row: int) -> Tensor:
        place_of, x = int(place[row] - begin[row]), x.view(-1, width).float()
        first, second = x.chunk(2, -1)
        return x * cos[place_of].float() + torch.cat([-second, first], -1) * sin[place_of].float()

    for row in range(rows):
        here = int(place[row])
        new_key, new_value = turned(key[row], row), value[row].view(key_heads, width)
        torch.testing.assert_close(stored[0, row, :, here].float(), new_key, rtol=CLOSE[dtype], atol=CLOSE[dtype])
        assert torch.equal(stored[1, row, :, here], new_value)
        whole[0, row, :, here], whole[1, row, :, here] = stored[0, row, :, here], new_value
        keys, values = whole[:, row, :, int(begin[row]) : here + 1].float().repeat_interleave(heads // key_heads, 1)
        asked = turned(query[row], row).to(dtype).float()
        shares = (torch.einsum("hd,hwd->hw", asked, keys) * width**-0.5).softmax(-1)
        wanted = torch.einsum("hw,hwd->hd", shares, values)
        torch.testing.assert_close(out[row].view(heads, width).float(), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    whole[:, readers, :, :prompt] = float("nan")
    torch.testing.assert_close(stored, whole, rtol=0, atol=0, equal_nan=True)  # nothing else was written
    assert torch.isfinite(out).all()
