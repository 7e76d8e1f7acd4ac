"""Memory telemetry: the process always, GPUs where there are any."""

import psutil
import pytest
import torch

from rlkit.metrics import telemetry


def test_the_resident_memory_is_that_of_this_process():
    found = telemetry.memory()
    assert list(found) == ["memory/process_rss_mb"]
    assert found["memory/process_rss_mb"] == pytest.approx(psutil.Process().memory_info().rss / 1e6, rel=0.2)


def test_roles_on_the_cpu_have_no_gpu_memory():
    assert list(telemetry.memory({"actor": "cpu"})) == ["memory/process_rss_mb"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_roles_on_a_gpu_report_what_the_process_holds_there():
    held = torch.empty(64, 1_000_000, dtype=torch.uint8, device="cuda:0")
    found = telemetry.memory({"actor": "cuda:0", "critic": "cuda", "reward": "cpu"})
    assert found["memory/actor_gpu_mem_mb"] >= held.nbytes / 1e6
    assert found["memory/critic_gpu_mem_mb"] == found["memory/actor_gpu_mem_mb"]
    assert found["memory/gpu0_used_mb"] >= found["memory/actor_gpu_mem_mb"]
    assert "memory/reward_gpu_mem_mb" not in found
