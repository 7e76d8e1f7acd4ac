"""The collator: padding, shards and packing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.batch import DataCollector, PackedBatch, RolloutBatch, mask_from_lengths
from rlkit.errors import DataError
from tests.batches import COLLECTOR, PAD, TWO, make_batch, same


def test_lengths_that_do_not_fit_are_refused() -> None:
    for lengths in ([6], [-1]):
        with pytest.raises(DataError, match=r"lengths must be within 0\.\.5"):
            mask_from_lengths(lengths, 5)


rows = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(st.integers(0, 9), min_size=1, max_size=5)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=50, deadline=None)
@given(rows=rows, size=st.integers(1, 6), extra=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_padding_trimming_splitting_and_packing_keep_every_token(
    rows: list[tuple[list[int], list[int]]], size: int, extra: tuple[int, int]
) -> None:
    batch = make_batch([prompt for prompt, _ in rows], [response for _, response in rows])
    wide = COLLECTOR.pad(batch, batch.prompt_width + extra[0], batch.response_width + extra[1])
    assert same(wide.trim(), batch)
    assert same(RolloutBatch.cat([part.trim() for part in wide.split(size)], PAD), batch)
    assert torch.equal(wide.position_ids[wide.full_attention_mask], batch.position_ids[batch.full_attention_mask])
    packed = COLLECTOR.pack(wide)
    assert packed.input_ids.tolist() == [token for prompt, response in rows for token in prompt + response]
    for i, (prompt, response) in enumerate(rows):
        start, stop = packed.cu_seqlens[i : i + 2].tolist()
        assert packed.input_ids[start:stop].tolist() == prompt + response
        assert packed.position_ids[start:stop].tolist() == list(range(len(prompt + response)))
    assert torch.equal(COLLECTOR.unpack(packed.input_ids, wide), wide.generated_ids * wide.full_attention_mask)


def test_shards_are_consecutive_and_complete() -> None:
    seven = TWO.select([0, 1, 0, 1, 1, 0, 1])
    shards = [COLLECTOR.shard(seven, rank, 3) for rank in range(3)]
    assert [len(shard) for shard in shards] == [2, 2, 3]
    assert same(RolloutBatch.cat(shards), seven)
    with pytest.raises(DataError, match=r"rank must be within 0\.\.2, given 3"):
        COLLECTOR.shard(seven, 3, 3)
    with pytest.raises(DataError, match="cannot share 2 rows among 3 ranks"):
        COLLECTOR.shard(TWO, 0, 3)


def test_slices_are_trimmed_and_aligned_again() -> None:
    parts = [COLLECTOR.slice(TWO, i, i + 1) for i in range(2)]
    assert [(part.prompt_width, part.response_width) for part in parts] == [(3, 3), (1, 5)]
    aligned = COLLECTOR.align(parts)
    assert all(same(part, TWO.select([i])) for i, part in enumerate(aligned))


def test_packed_form() -> None:
    packed = COLLECTOR.pack(TWO)
    assert isinstance(packed, PackedBatch)
    assert packed.cu_seqlens.tolist() == [0, 6, 12]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5] * 2
    with pytest.raises(DataError, match="12 real tokens, given 11 packed values"):
        COLLECTOR.unpack(torch.zeros(11), TWO)


def test_bad_input_to_the_collator_is_refused() -> None:
    with pytest.raises(DataError, match="prompt 1 has no tokens"):
        COLLECTOR.collate_prompts([[1], []])
    with pytest.raises(DataError, match="empty list of token rows"):
        COLLECTOR.collate_responses([])
    with pytest.raises(DataError, match=r"lengths must be within 0\.\.2"):
        COLLECTOR.collate_prompts([[1, 2, 3]], width=2)
    with pytest.raises(DataError, match="2 prompts and 1 responses"):
        COLLECTOR.collate([[1], [2]], [[3]])
    with pytest.raises(DataError, match="cannot pad prompts from width 3 to 2"):
        COLLECTOR.pad(TWO, prompt_width=2)
    with pytest.raises(DataError, match="pad_token_id must be a token id"):
        DataCollector(None)  # type: ignore[arg-type]


def test_an_empty_response_is_a_row_without_tokens() -> None:
    fields = COLLECTOR.collate_responses([[], [5]])
    assert fields["response_mask"].int().tolist() == [[0], [1]]
    assert COLLECTOR.collate_responses([[]])["response_mask"].shape == (1, 1)
