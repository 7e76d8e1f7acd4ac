"""Native generation on the real small model: greedy tokens of transformers, log-probs of a forward pass."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.engines.models import load_causal_lm, load_tokenizer
from rlkit.generation.base import SamplingParams
from rlkit.generation.cpu import compiled
from rlkit.generation.native import NativeGenerator, decoder_for
from tests.generation.models import rng, teacher_forced

SUBJECTS = [
    "The film", "My neighbour's old dog", "Rain", "The capital of France", "A good teacher", "Bread", "In 1969, a man",
    "She",
]  # fmt: skip
VERBS = ["was", "is known for", "has never been", "will", "and the sea", "said:", "makes people", "can be found in the"]


@functools.cache
def small_model(dtype: torch.dtype) -> Any:
    return load_causal_lm("smollm2-135m", dtype=dtype).eval()


def tokenized(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Ids and mask (rows, width), padded on the left."""
    tokenizer = load_tokenizer(small_model(torch.float32))
    encoded = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"].bool()


@pytest.mark.parametrize("path", ["CompiledDecoder", "ColumnDecoder"])
def test_greedy_tokens_are_those_of_transformers_for_64_prompts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "CompiledDecoder":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(compiled, "_kernels", lambda: None)
    model = small_model(torch.float32)
    ids, mask = tokenized([" ".join(pair) for pair in itertools.product(SUBJECTS, VERBS)])
    assert len({tuple(row) for row in ids.tolist()}) == 64
    assert len(set(mask.sum(-1).tolist())) > 4  # lengths differ, so rows have padding
    assert type(decoder_for(model, 8)).__name__ == path
    out = NativeGenerator(model).generate(ids, mask, SamplingParams(16, temperature=0), rng())
    reference = model.generate(
        ids, attention_mask=mask.long(), do_sample=False, max_new_tokens=16, min_new_tokens=16, eos_token_id=None
    )
    assert torch.equal(out.generated_ids, reference)
    assert len({tuple(row) for row in reference[:, ids.shape[1] :].tolist()}) > 48  # the prompts matter


@pytest.mark.parametrize(
    ("dtype", "rows", "largest", "average"), [(torch.float32, 8, 5e-4, 5e-5), (torch.bfloat16, 4, 0.25, 0.0625)]
)
def test_log_probs_equal_a_teacher_forced_forward(
    dtype: torch.dtype, rows: int, largest: float, average: float
) -> None:
    """In bf16 a logit between 16 and 32 has steps of 0.125: two of them at most, half of one on average."""
    model = small_model(dtype)
    ids, mask = tokenized([f"{subject} was" for subject in SUBJECTS[:rows]])
    out = NativeGenerator(model).generate(ids, mask, SamplingParams(12), rng(1))
    error = (out.rollout_logprobs - teacher_forced(model, mask, out)).abs()
    assert out.response_mask.all()
    assert error.max() < largest
    assert error.mean() < average
    assert out.rollout_logprobs.mean() < -1  # the tokens were not certain
