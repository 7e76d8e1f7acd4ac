"""The compiled decoding step: its parts against float64, the whole against the other paths, threads, and no numba."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlkit.engines.forward import cache_argument
from rlkit.generation.base import SamplingParams
from rlkit.generation.cpu import compiled
from rlkit.generation.cpu.columns import ColumnDecoder
from rlkit.generation.cpu.compiled import CompiledDecoder
from rlkit.generation.llama import LlamaDecoder
from rlkit.generation.native import NativeGenerator, decoder_for
from tests.generation.models import WRITTEN_OUT, family_model, prompts, rng

pytest.importorskip("numba")


@pytest.fixture
def threads() -> Any:
    """Sets torch's number of threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def logits_of(decoder: Any, steps: list[Tensor], rows: int = 5, width: int = 6) -> list[Tensor]:
    """Logits of a prefill of `rows` prompts and of these steps; tokens are given, rows are dropped where they end."""
    ids, mask = prompts(rows, width)
    with torch.no_grad():
        logits = [decoder.prefill(ids, mask)]
        for tokens in steps:
            logits.append(decoder.step(tokens))
    return logits


def made(kind: Any, model: nn.Module, capacity: int = 16) -> Any:
    return kind(model, cache_argument(model), capacity)


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 1, 8), (3, 5, 8), (4, 16, 16), (7, 33, 24), (10, 100, 40), (65, 576, 64)]
)
@pytest.mark.parametrize("add", [0, 1])
def test_a_product_equals_one_in_float64(rows: int, depth: int, columns: int, add: int) -> None:
    from rlkit.generation.cpu.tiles import product

    torch.manual_seed(0)
    weight, bias = torch.randn(rows, depth), torch.randn(rows)
    x, around = torch.randn(depth, columns), torch.randn(rows + 2, columns)
    out = around.clone()
    expected = weight.double() @ x.double() + bias.double().unsqueeze(-1)
    scale = (weight.double().abs() @ x.double().abs()).max()
    addresses = [weight.data_ptr(), bias.data_ptr(), rows, depth, x.data_ptr(), columns, out[1:].data_ptr(), add]
    product(*addresses)
    error = (out[1:-1] - expected - add * around[1:-1]).abs().max() / scale
    assert error < 1e-6
    assert torch.equal(out[[0, -1]], around[[0, -1]])  # nothing beside it is written


def test_the_exponential_is_that_of_float64() -> None:
    from rlkit.generation.cpu.tiles import exp

    points = torch.linspace(-86, 86, 2001)
    found = torch.tensor([exp(point) for point in points.numpy()], dtype=torch.float64)
    torch.testing.assert_close(found, points.double().exp(), rtol=2e-7, atol=0)
    assert exp(points.numpy()[0] * 10) < 1e-37
    assert exp(points.numpy()[-1] * 10) > 1e38


@pytest.mark.parametrize("family", WRITTEN_OUT)
def test_logits_equal_those_of_the_other_steps(family: str) -> None:
    model = family_model(family)
    steps = [torch.arange(5) + 7 * i for i in range(4)]
    found, expected, columns = (
        logits_of(made(kind, model), steps) for kind in (CompiledDecoder, LlamaDecoder, ColumnDecoder)
    )
    assert len(found) == 5
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(found, columns, atol=3e-5, rtol=1e-5)


def test_a_long_prompt_goes_through_the_model_itself() -> None:
    model = family_model("qwen2")
    steps = [torch.arange(14), torch.arange(14) + 20]
    assert sum(prompts(14, 16)[1].sum(-1)) > compiled._FEW_TOKENS
    found, expected = (logits_of(made(kind, model, 20), steps, 14, 16) for kind in (CompiledDecoder, LlamaDecoder))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1:], expected[1:], atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_other_rows_change_no_bit(family: str) -> None:
    model = family_model(family)
    steps = [torch.arange(20) % 48, (torch.arange(20) * 5) % 48]
    ids, mask = prompts(20, 3)
    with torch.no_grad():
        together = made(CompiledDecoder, model)
        all_rows = [together.prefill(ids, mask), *map(together.step, steps)]
        for few in ([0], [7, 3], [19, 2, 2, 5, 11, 0, 1, 8, 9]):
            decoder = made(CompiledDecoder, model)
            alone = [decoder.prefill(ids[few], mask[few]), *(decoder.step(tokens[few]) for tokens in steps)]
            assert all(torch.equal(a, b[few]) for a, b in zip(alone, all_rows, strict=True))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_number_of_threads_changes_no_bit(count: int, threads: Any) -> None:
    model = family_model("qwen3")
    params = SamplingParams(10, stop_token_ids=(2, 3, 4))
    threads(1)
    one = NativeGenerator(model).generate(*prompts(11, 5), params, rng(3))
    threads(count)
    for _ in range(5):
        more = NativeGenerator(model).generate(*prompts(11, 5), params, rng(3))
        assert torch.equal(more.generated_ids, one.generated_ids)
        assert torch.equal(more.rollout_logprobs, one.rollout_logprobs)


def test_callers_in_several_threads_do_not_meet(threads: Any) -> None:
    threads(2)
    models = [family_model("llama", seed) for seed in range(4)]
    params = SamplingParams(10, temperature=0)
    alone = [NativeGenerator(model).generate(*prompts(), params, rng()).generated_ids for model in models]
    assert not torch.equal(alone[0], alone[1])
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = pool.map(lambda model: NativeGenerator(model).generate(*prompts(), params, rng()), models)
            assert all(torch.equal(out.generated_ids, ids) for out, ids in zip(found, alone, strict=True))


def test_no_thread_is_left_when_a_decoder_is_gone(threads: Any) -> None:
    threads(3)
    before = set(threading.enumerate())
    NativeGenerator(family_model("llama")).generate(*prompts(), SamplingParams(3), rng())
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_helpers_that_never_start_are_not_needed() -> None:
    model = family_model("llama")
    steps = [torch.arange(5)]
    expected = logits_of(made(CompiledDecoder, model), steps)
    busy, decoder = threading.Event(), made(CompiledDecoder, model)
    decoder.threads, decoder.pool = 2, ThreadPoolExecutor(1)
    decoder.pool.submit(busy.wait)
    found = logits_of(decoder, steps)
    busy.set()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_numba_the_other_path_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(8, temperature=0)
    for family in WRITTEN_OUT:
        model = family_model(family)
        assert type(decoder_for(model, 8)) is CompiledDecoder
        with_it = NativeGenerator(model).generate(*prompts(), params, rng())
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "_kernels", compiled._kernels.__wrapped__)  # nothing kept
            patch.delitem(sys.modules, "rlkit.generation.cpu.kernels")
            patch.delitem(sys.modules, "rlkit.generation.cpu.tiles")
            patch.setitem(sys.modules, "numba", None)  # its import fails
            assert type(decoder_for(model, 8)) is ColumnDecoder
            without = NativeGenerator(model).generate(*prompts(), params, rng())
        assert torch.equal(without.generated_ids, with_it.generated_ids)


def test_other_activations_and_layouts_take_the_other_path() -> None:
    model = family_model("llama")
    model.model.layers[1].mlp.act_fn = nn.GELU()
    assert type(decoder_for(model, 8)) is ColumnDecoder
    model = family_model("llama")
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight = nn.Parameter(projection.weight.detach().t().contiguous().t())
    assert type(decoder_for(model, 8)) is ColumnDecoder


_RUN = """
import sys
from unittest import mock
from numba.core import caching
from rlkit.generation.cpu import compiled
{before}
kernels = compiled._kernels()
stats = kernels.forward.stats
print(sum(stats.cache_hits.values()), "kept" if stats.cache_path else "not kept")
"""


def test_it_is_compiled_once_a_machine_and_works_where_nothing_can_be_kept(tmp_path: Path) -> None:
    def hits(before: str = "") -> str:
        program = f"import os; os.environ['NUMBA_CACHE_DIR'] = {str(tmp_path)!r}" + _RUN.format(before=before)
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert hits() == "0 kept"
    assert hits() == "1 kept"
    implementation = "getattr(caching, 'CacheImpl', None) or caching._CacheImpl"
    nowhere = f"mock.patch.object({implementation}, '_locator_classes', []).start()"
    assert hits(nowhere) == "0 not kept"


def test_numba_is_loaded_by_nothing_but_decoding() -> None:
    program = "import sys, rlkit, rlkit.generation.native; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert importlib.util.find_spec("numba") is not None
