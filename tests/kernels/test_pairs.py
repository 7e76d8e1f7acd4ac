"""Rows that attend two by two, whatever each has: where their columns begin and end, and whose slots they read."""

from __future__ import annotations

import mmap
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.kernels import attention
from tests.kernels.device import DEVICE, needs_kernels

pytestmark = needs_kernels

HEADS, KEY_HEADS, WIDTH, CAPACITY = 2, 1, 4, 64


class Row(NamedTuple):
    """Columns of a row: padding, its prompt, what it has written; and the slot that it reads its prompt from."""

    padding: int
    prompt: int
    written: int
    source: int

    @property
    def prompt_end(self) -> int:
        return self.padding + self.prompt

    @property
    def place(self) -> int:
        return self.prompt_end + self.written


@st.composite
def pairs(draw: st.DrawFn) -> list[Row]:
    """Two or three rows, of which neighbours are often of one prompt, or nearly; columns come in tiles of 16."""
    made: list[Row] = []
    for _ in range(draw(st.sampled_from([2, 2, 3]))):
        row = Row(*(draw(st.sampled_from(few)) for few in ((0, 1, 5), (0, 1, 16, 18), (0, 1, 14, 20), (0, 1, 2))))
        like = draw(st.sampled_from(["own", "same prompt", "other begin", "other end"]))
        if made and like != "own":
            row = made[-1]._replace(written=row.written)
        if like == "other begin" and row.prompt:
            row = row._replace(padding=row.padding + 1, prompt=row.prompt - 1)
        made.append(row._replace(prompt=row.prompt + 1) if like == "other end" else row)
    # Nobody reads where another row writes: only slots that have so long a prompt hold it.
    may = [row.source < len(made) and made[row.source].place >= row.prompt_end for row in made]
    return [row if fits else row._replace(source=at) for at, (row, fits) in enumerate(zip(made, may, strict=True))]


def attended(rows: list[Row], share: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Result and cache of the kernel, and both written out in float64; what nobody reads is not a number."""
    generator = torch.Generator().manual_seed(0)
    count = len(rows)
    query = torch.randn(count, HEADS * WIDTH, generator=generator)
    key, value = torch.randn(2, count, KEY_HEADS * WIDTH, generator=generator)
    cache = torch.randn(2, count, KEY_HEADS, CAPACITY, WIDTH, generator=generator)
    angle = torch.randn(CAPACITY, WIDTH // 2, generator=generator).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    signed = torch.cat([-sin[:, : WIDTH // 2], sin[:, WIDTH // 2 :]], -1)

    def turned(x: Tensor, position: int) -> Tensor:
        x = x.view(-1, WIDTH)
        return x * cos[position] + x.roll(WIDTH // 2, -1) * signed[position]

    wanted, read = torch.empty(count, HEADS, WIDTH), torch.zeros(count, CAPACITY, dtype=torch.bool)
    for at, row in enumerate(rows):
        read[row.source, row.padding : row.prompt_end] = True
        read[at, row.prompt_end : row.place] = True
    cache.masked_fill_(~read[:, None, :, None], float("nan"))
    after = cache.clone()
    for at, row in enumerate(rows):
        position = row.place - row.padding
        after[:, at, :, row.place] = torch.stack([turned(key[at], position), value[at].view(KEY_HEADS, WIDTH)])
        prompt = cache[:, row.source, 0, row.padding : row.prompt_end]
        keys, values = torch.cat([prompt, after[:, at, 0, row.prompt_end : row.place + 1]], 1).double()
        shares = (turned(query[at], position).double() @ keys.T / 2).softmax(-1)
        wanted[at] = (shares @ values).float()
    where = torch.tensor([[row.padding, row.prompt_end, row.source, row.place] for row in rows], device=DEVICE).T
    given = (x.to(DEVICE) for x in (query, key, value, cos, signed))
    stored, arrivals = cache.to(DEVICE), attention.no_arrivals(DEVICE)
    tile = attention._Tile(share, 16, 2)
    with patch.object(attention, "_tile", lambda *_: tile):
        out = attention.attend_new_token(*given, stored, *(part.contiguous() for part in where), 0.5, arrivals)
    assert not arrivals.any()
    return out.cpu().view(count, HEADS, WIDTH), stored.cpu(), wanted, after


@example([Row(0, 16, 14, 0), Row(0, 16, 1, 0), Row(0, 16, 0, 1)], 2)
@example([Row(0, 16, 2, 0), Row(0, 16, 1, 1)], 1)
@example([Row(0, 18, 20, 0), Row(1, 17, 0, 0)], 3)
@example([Row(0, 16, 20, 0), Row(0, 17, 1, 0)], 2)
@example([Row(5, 0, 0, 0), Row(5, 0, 0, 1), Row(0, 18, 14, 2)], 2)
@given(pairs(), st.integers(1, 3))
@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
def test_each_row_reads_its_own_columns_and_no_others(rows: list[Row], share: int) -> None:
    out, stored, wanted, after = attended(rows, share)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stored, after, rtol=1e-6, atol=1e-6, equal_nan=True)


def reserved(count: int) -> Tensor:
    """(count,) float16 of any content."""
    if DEVICE.type == "cuda":
        return torch.empty(count, dtype=torch.float16, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux' MAP_NORESERVE, which Python has no name for yet
    return torch.frombuffer(mmap.mmap(-1, 2 * count, flags), dtype=torch.float16)


def test_heads_may_lie_further_apart_than_32_bits_count() -> None:
    """The third head begins 2**31 elements after the first: 8 GiB of a GPU; on a host untouched memory costs none."""
    apart = 1 << 30
    memory = reserved(4 * apart + 2048)
    # Were the distance counted in 32 bits, it would lead so far back from the first head.
    stored = memory.as_strided((2, 1, 3, 2, 16), (1024, 3 * apart, apart, 16, 1), 2 * apart)
    query, key, value = (
        torch.randn(1, 48, generator=torch.Generator().manual_seed(n)).half().to(DEVICE) for n in range(3)
    )
    turns = torch.tensor([1.0, 0.0], device=DEVICE)[:, None, None].expand(2, 2, 16).contiguous()
    begin, place = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    arrivals = attention.no_arrivals(DEVICE)
    out = attention.attend_new_token(query, key, value, *turns, stored, begin, begin, begin, place, 1.0, arrivals)
    assert torch.equal(out, value)
    assert torch.equal(stored[:, 0, :, 0].flatten(1), torch.cat([key, value]))


@pytest.mark.parametrize(
    ("width", "queries", "columns", "stages"), [(64, 16, 128, 3), (128, 64, 64, 3), (256, 32, 32, 3), (256, 64, 32, 2)]
)
def test_many_queries_leave_room_for_fewer_columns(width: int, queries: int, columns: int, stages: int) -> None:
    """In two bytes a number. Compiled for 99 KiB: 70, 88, 82 KiB; the last would take 100 with three stages."""
    tile = attention._tile(8, 4096, 4 * width, 2 * width * queries)
    assert (tile.columns, tile.stages) == (columns, stages)
    assert 2 * width * (queries + 2 * (stages - 1) * columns) <= 80 << 10
