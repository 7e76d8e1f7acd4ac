"""Device maps: what they can be written as, what they refuse, and that planning needs no GPU."""

import subprocess
import sys

import pytest
import torch

from rlkit import DeviceMap, PlacementError
from rlkit.device_map import parse_devices


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("cpu", ("cpu",)),
        ("mps", ("mps",)),
        ("cuda", ("cuda:0",)),
        ("cuda:3", ("cuda:3",)),
        ("cuda:0-3", ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("cuda:5-5", ("cuda:5",)),
        ("cuda:0,2,5-6", ("cuda:0", "cuda:2", "cuda:5", "cuda:6")),
        ("cuda:1, cuda:0", ("cuda:1", "cuda:0")),
        (["cuda:7", "cuda:8"], ("cuda:7", "cuda:8")),
        (("cuda:0-1", "cuda:4"), ("cuda:0", "cuda:1", "cuda:4")),
    ],
)
def test_devices_are_written_out_in_order(written, devices):
    assert parse_devices(written) == devices


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("gpu:0", "device 'gpu:0' .* cannot be read; write 'cpu', 'cuda:0', 'cuda:0-3'"),
        ("cuda:", "device 'cuda:' .* cannot be read"),
        ("cuda:x", "cannot be read"),
        ("0-3", "device '0-3' .* cannot be read"),
        ("cpu:0", "device 'cpu:0' .* cannot be read"),
        ("", "device '' .* cannot be read"),
        ("cuda:3-0", "range 'cuda:3-0' runs backwards; write cuda:0-3"),
        ("cuda:0-2,1", "names cuda:1 more than once"),
        ([], "names no device"),
        ([0, 1], "0 is not a device name"),
    ],
)
def test_devices_that_cannot_be_read(written, message):
    with pytest.raises(PlacementError, match=message):
        parse_devices(written)


def test_the_default_is_the_first_gpu_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert DeviceMap.default() == DeviceMap("single", devices="cpu") == DeviceMap()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert DeviceMap.default().primary == "cuda:0"


def test_strategies_and_what_belongs_to_them():
    sharded = DeviceMap(strategy="fsdp", devices=["cuda:0", "cuda:1", "cuda:2", "cuda:3"], sharding_dim="model")
    assert (sharded.primary, len(sharded.devices), sharded.sharding_dim) == ("cuda:0", 4, "model")
    assert DeviceMap(strategy="tp", devices=["cuda:5", "cuda:6"], tp_size=2).tp_size == 2
    assert DeviceMap("tp", "cuda:0-3").tp_size == 4
    assert DeviceMap("ddp", "cuda:0-1").tp_size is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "zero3"}, "strategy='zero3' is unknown; choose one of single, ddp, fsdp, tp"),
        ({"devices": "cuda:0-3"}, "'single' takes one device, 4 were given .* choose 'ddp', 'fsdp' or 'tp'"),
        ({"strategy": "ddp", "devices": "cuda:0-1", "tp_size": 2}, "tp_size=2 was given with strategy='ddp'"),
        ({"strategy": "tp", "devices": "cuda:0-2", "tp_size": 2}, "tp_size=2 does not divide the 3 devices"),
        ({"strategy": "tp", "devices": "cuda:0-1", "tp_size": 0}, "tp_size=0 does not divide"),
        ({"strategy": "tp", "devices": "cuda:0-1", "tp_size": True}, "tp_size=True does not divide"),
        (
            {"strategy": "tp", "devices": "cuda:0-1", "sharding_dim": "model"},
            "sharding_dim='model' with strategy='tp' means nothing",
        ),
        ({"strategy": "fsdp", "devices": "cuda:0-1", "sharding_dim": "batch"}, "sharding_dim='batch'"),
    ],
)
def test_plans_that_make_no_sense(arguments, message):
    with pytest.raises(PlacementError, match=message):
        DeviceMap(**{"devices": "cuda:0", **arguments})


@pytest.mark.parametrize(
    ("spec", "strategy", "devices"),
    [
        ("cuda:1", "single", ("cuda:1",)),
        ({"model": "cuda:0-1"}, "fsdp", ("cuda:0", "cuda:1")),
        (["cuda:4", "cuda:5"], "fsdp", ("cuda:4", "cuda:5")),
        (DeviceMap("ddp", "cuda:0-1"), "ddp", ("cuda:0", "cuda:1")),
    ],
)
def test_a_configuration_value_becomes_a_map(spec, strategy, devices):
    made = DeviceMap.from_spec(spec)
    assert (made.strategy, made.devices) == (strategy, devices)


def test_a_mapping_with_another_key_is_refused():
    with pytest.raises(PlacementError, match="'head': 'cuda:1'.* must have the one key 'model'"):
        DeviceMap.from_spec({"model": "cuda:0", "head": "cuda:1"})


def test_one_device_is_required_where_this_version_needs_it():
    assert DeviceMap(devices="cuda:2").require_single() == "cuda:2"
    with pytest.raises(
        PlacementError, match=r"DeviceMap\('fsdp', devices='cuda:0,cuda:1'\) names 2 devices; this version"
    ):
        DeviceMap("fsdp", "cuda:0-1").require_single()


def test_missing_devices_are_named_with_those_that_are_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    DeviceMap("ddp", "cuda:0-1").require_available()
    with pytest.raises(PlacementError, match=r"names cuda:2, cuda:3, but this machine has only cpu, cuda:0, cuda:1"):
        DeviceMap("fsdp", "cuda:1-3").require_available()


def test_maps_are_values():
    one, other = DeviceMap("tp", "cuda:0-1"), DeviceMap("tp", ["cuda:0", "cuda:1"])
    assert one == other
    assert hash(one) == hash(other)
    assert DeviceMap(**one.to_json()) == one
    with pytest.raises(AttributeError):
        one.devices = ("cpu",)


def test_planning_for_gpus_loads_no_torch():
    code = (
        "import sys; from rlkit.device_map import DeviceMap; DeviceMap('fsdp', 'cuda:0-7').to_json(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
