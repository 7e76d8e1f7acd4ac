"""What every controller has: ports, a name, a place, and strict state."""

import subprocess
import sys

import pytest
import torch

from rlkit import CheckpointError, Controller, DataflowError, DeviceMap, Field, PlacementError
from rlkit.controllers.base import field_names
from tests.dataflow.fakes import Actor, prompts


class Brevity(Controller):
    reads = ("response_mask",)
    writes = (Field("brevity", ("B",), "float32", "1 / response length"),)

    def run(self, batch):
        return {"brevity": 1.0 / batch["response_mask"].sum(-1).clamp(min=1).float()}


def test_ports_know_their_controller_and_kind_and_compare_by_both():
    one, other = Brevity(), Brevity()
    assert (one.input.kind, one.output.kind, one.feedback.kind) == ("input", "output", "feedback")
    assert one.output.controller is one
    assert one.output == one.output
    assert one.output != other.output
    assert one.output != one.input
    assert repr(one.feedback) == "custom.feedback"


def test_the_name_is_the_role_unless_given():
    assert (Brevity().name, Brevity("short").name, Actor().name) == ("custom", "short", "actor")
    assert repr(Brevity("short")) == "Brevity(name='short', role='custom')"


@pytest.mark.parametrize("name", ["", "  ", 7])
def test_a_name_is_text(name):
    with pytest.raises(DataflowError, match=r"Brevity\(name=.*a name is a non-empty string"):
        Brevity(name)


def test_a_subclass_need_not_call_the_base_constructor():
    class Bare(Brevity):
        def __init__(self):
            self.scale = 2.0

    bare = Bare()
    assert bare.name == "custom"
    assert bare.output.controller is bare
    bare.device_map = DeviceMap(devices="cpu")
    assert bare.device == "cpu"


def test_a_controller_without_run_cannot_be_made():
    class Idle(Controller):
        pass

    with pytest.raises(TypeError, match="run"):
        Idle()


def test_the_device_follows_the_map_and_the_controller_is_told():
    told = []

    class Moved(Brevity):
        def placed(self, device_map):
            told.append(device_map.primary)

    moved = Moved()
    assert moved.device == DeviceMap.default().primary
    moved.device_map = DeviceMap("single", devices="cuda:4")
    assert (moved.device, moved.device_map.devices, told) == ("cuda:4", ("cuda:4",), ["cuda:4"])


def test_looking_at_the_default_place_does_not_settle_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    brevity = Brevity()
    assert brevity.device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert brevity.device == "cuda:0"


def test_a_device_name_is_no_device_map():
    with pytest.raises(
        PlacementError, match=r"short.device_map = 'cuda:0': expected a DeviceMap, for example DeviceMap"
    ):
        Brevity("short").device_map = "cuda:0"


def test_a_controller_that_keeps_nothing_refuses_the_state_of_another():
    brevity = Brevity("short")
    assert brevity.state_dict() == {}
    brevity.load_state_dict({})
    with pytest.raises(
        CheckpointError, match=r"controller 'short' \(Brevity\) keeps no state, but was given \['weight'\]"
    ):
        brevity.load_state_dict({"weight": 1})


def test_run_streaming_is_run_until_overridden():
    batch = prompts(3).with_fields({"response_mask": [[True, True], [True, False], [False, False]]})
    emitted = []
    done = Brevity().run_streaming(batch, lambda rows, fields: emitted.append(rows))
    assert done["brevity"].tolist() == [0.5, 1.0, 1.0]
    assert emitted == []


def test_declarations_hold_names_or_fields():
    brevity = Brevity("short")
    assert field_names(brevity, brevity.writes, "writes") == ("brevity",)
    with pytest.raises(
        DataflowError, match=r"controller 'short': reads = 'responses' is one string; .*\('responses',\)"
    ):
        field_names(brevity, "responses", "reads")
    with pytest.raises(DataflowError, match="controller 'short': writes holds 3; expected field names"):
        field_names(brevity, (3,), "writes")


def test_declaring_a_controller_and_a_dataflow_loads_no_torch():
    code = (
        "import sys; from rlkit import Controller, Dataflow, DeviceMap\n"
        "class Mine(Controller):\n"
        "    heavy = False\n"
        "    reads, writes = ('responses',), ('rewards',)\n"
        "    def run(self, batch): return {}\n"
        "Dataflow().add(Mine('a'), Mine('b'))._repr_mimebundle_()\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
