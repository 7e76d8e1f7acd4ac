"""Importing rlkit is cheap, and what reads runs stays free of the heavy libraries."""

import subprocess
import sys

import pytest

from tests.source_tree import modules

HEAVY = ("torch", "transformers", "ray", "vllm", "tensordict", "pandas", "plotly", "anywidget", "numpy")

_PROGRAM = """
import sys, time
before = set(sys.modules)
began = time.perf_counter()
{statement}
print(time.perf_counter() - began)
print(" ".join(name for name in {heavy} if name in sys.modules and name not in before))
"""


def measure(statement: str, heavy: tuple[str, ...] = HEAVY) -> tuple[float, set[str]]:
    """Seconds that a statement takes in a fresh interpreter, and which of `heavy` it loaded."""
    program = _PROGRAM.format(statement=statement, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, loaded = done.stdout.splitlines()
    return float(seconds), set(loaded.split())


def test_import_rlkit_is_quick_and_loads_nothing_heavy() -> None:
    tries = [measure("import rlkit") for _ in range(3)]
    assert min(seconds for seconds, _ in tries) < 0.3
    assert tries[0][1] == set()


def test_the_measure_sees_a_heavy_import() -> None:
    assert measure("import numpy")[1] == {"numpy"}


@pytest.mark.parametrize("package", ["rlkit.runs", "rlkit.cli"])
def test_modules_around_a_run_load_no_torch(package: str) -> None:
    names = [name for name in modules() if name.startswith(f"{package}.")]
    assert names
    assert measure("import " + ", ".join(names), ("torch", "transformers", "ray", "vllm"))[1] == set()


def test_error_names_come_without_a_lookup() -> None:
    assert measure("from rlkit import RlkitError, RunError")[1] == set()
