"""What vLLM does to a process and to its memory, against stand-ins with vLLM's names. Needs no vLLM."""

from __future__ import annotations

import random
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlkit.errors import GenerationError
from rlkit.generation.vllm.process import (
    close_llm,
    forget_shared_layers,
    process_state_kept,
    require_no_other_sleeper,
)
from rlkit.generation.vllm.transfer import update_ended, used_as_loaded
from rlkit.generation.vllm.versions import Engine

SDP = ("flash", "mem_efficient", "math", "cudnn")


def switches() -> list[Any]:
    kinds = [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in SDP]
    return [*kinds, torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.get_num_threads()]


def disturb() -> None:
    for kind in SDP:
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(kind == "math")
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_num_threads = lambda threads: None
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    raise KeyError


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_what_an_import_or_an_engine_sets_is_set_back(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    kept, set_threads = switches(), torch.set_num_threads
    try:
        with pytest.raises(KeyError), process_state_kept():
            disturb()
        assert switches() == kept
        assert torch.set_num_threads is set_threads
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    finally:
        torch.set_float32_matmul_precision(before)


class Block:
    """One block of the memory for sleeping, as vLLM's allocator keeps it: (device, bytes, address, handle)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.handle = (0, storage.nbytes(), storage.data_ptr(), 0)


def sleeping_memory(monkeypatch: pytest.MonkeyPatch, *tensors: torch.Tensor) -> Any:
    blocks = [Block(tensor) for tensor in tensors]
    memory = SimpleNamespace(pointer_to_data={block.handle[2]: block for block in blocks}, allocator_and_pools={})
    memory.get_current_usage = lambda: sum(block.handle[1] for block in memory.pointer_to_data.values())
    module = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=memory))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    return memory


def test_a_second_engine_that_sleeps_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.device_allocator.cumem", raising=False)
    require_no_other_sleeper()
    memory = sleeping_memory(monkeypatch, torch.zeros(3 << 18))
    with pytest.raises(GenerationError, match=r"holds 3 MiB.*generator\.release\(\).*vllm=\{\"sleep\": False\}"):
        require_no_other_sleeper()
    memory.pointer_to_data.clear()
    require_no_other_sleeper()


def test_engines_share_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = SimpleNamespace(_ROPE_DICT={"a": nn.Identity()})
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.rotary_embedding", rotary)
    forget_shared_layers()
    assert rotary._ROPE_DICT == {}


class Pool:
    """Weak references can be made to it, which a plain object does not allow."""


def running(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str], nn.Module, torch.Tensor]:
    """An engine in parts: model and cache lie in the memory for sleeping, one buffer does not."""
    told: list[str] = []
    model = nn.Linear(4, 4)
    model.register_buffer("shared", torch.ones(4))
    cache = torch.ones(8)
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(model=model, kv_caches=[cache]), weight_transfer_engine=object()
    )
    core = SimpleNamespace(shutdown=lambda: told.append("shutdown"))
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core, model_executor=executor), worker=worker)
    memory = sleeping_memory(monkeypatch, model.weight, model.bias, cache)
    memory.allocator_and_pools["weights"] = (Pool(), "the allocator")
    return llm, told, model, cache


def test_closing_frees_the_memory_although_something_still_refers_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, told, model, cache = running(monkeypatch)  # these names are the something
    worker = llm.worker
    pools = sys.modules["vllm.device_allocator.cumem"].CuMemAllocator.instance.allocator_and_pools
    pool = weakref.ref(pools["weights"][0])
    alive: list[bool] = []

    def shutdown() -> None:
        pools.clear()  # as vLLM does, before the tensors are gone
        alive.append(pool() is not None)
        told.append("shutdown")

    llm.llm_engine.engine_core.shutdown = shutdown
    close_llm(llm)
    assert told == ["shutdown"]
    assert alive == [True]
    assert pool() is None
    assert [t.untyped_storage().nbytes() for t in (model.weight, model.bias, cache)] == [0, 0, 0]
    assert model.shared.tolist() == [1.0] * 4
    assert (worker.model_runner, worker.weight_transfer_engine, llm.llm_engine) == (None, None, None)


def test_closing_without_memory_for_sleeping_empties_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, told, model, _ = running(monkeypatch)
    monkeypatch.delitem(sys.modules, "vllm.device_allocator.cumem")
    close_llm(llm)
    assert told == ["shutdown"]
    assert model.weight.untyped_storage().nbytes() == 64


@pytest.mark.parametrize("part", ["llm_engine", "engine_core", "driver_worker", "model_runner"])
def test_an_engine_in_pieces_can_be_closed(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    llm, _, _, _ = running(monkeypatch)
    for place in (llm, llm.llm_engine, llm.llm_engine.model_executor, llm.worker):
        vars(place).pop(part, None)
    engine = Engine(llm, None, can_sleep=True, own_group=False)
    engine._asleep = ["weights", "kv_cache"]  # and it cannot wake
    engine.close()
    engine.close()


def layer(**attributes: Any) -> nn.Module:
    made = nn.Linear(2, 2)
    for name, value in attributes.items():
        setattr(made, name, value)
    return nn.Sequential(made)


def called(name: str, **attributes: Any) -> Any:
    return type(name, (), attributes)()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (layer(), True),
        (layer(quant_method=called("UnquantizedLinearMethod")), True),
        (layer(quant_method=called("UnquantizedEmbeddingMethod"), cpu_linear=nn.functional.linear), True),
        (layer(quant_method=called("UnquantizedFusedMoEMethod")), False),
        (layer(quant_method=called("Fp8LinearMethod")), False),
        (layer(cpu_linear=lambda x, weight, bias: x), False),
        (layer(process_weights_after_loading=print), False),
    ],
)
def test_layers_that_keep_something_made_of_their_weights_are_known(model: nn.Module, expected: bool) -> None:
    assert used_as_loaded(model) is expected


@pytest.mark.parametrize(("sinks", "expected"), [(None, True), (torch.ones(2), False)])
def test_attention_keeps_nothing_but_sinks(sinks: Any, expected: bool) -> None:
    class Attention(nn.Module):
        def process_weights_after_loading(self, dtype: torch.dtype) -> None: ...

    class MLAAttention(Attention): ...

    plain, latent = Attention(), MLAAttention()
    plain.impl = latent.impl = SimpleNamespace(sinks=sinks)
    assert used_as_loaded(nn.Sequential(plain)) is expected
    assert not used_as_loaded(nn.Sequential(latent))


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_update_that_breaks_off_is_over(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    llm, *_ = running(monkeypatch)
    llm.worker._weight_update_active = True
    with pytest.raises(error), update_ended(llm):
        raise error
    assert llm.worker._weight_update_active is False


def test_a_precision_of_one_backend_is_left_alone() -> None:
    """Set through torch's newer names; asking for the older one's value is then an error of torch's."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with process_state_kept():
            pass
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_the_process_group_is_given_back_although_closing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, told, *_ = running(monkeypatch)
    llm.llm_engine.engine_core.shutdown = lambda: 1 / 0
    state = SimpleNamespace(cleanup_dist_env_and_memory=lambda: told.append("group"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    with pytest.raises(ZeroDivisionError):
        Engine(llm, None, can_sleep=False, own_group=True).close()
    assert told == ["group"]
