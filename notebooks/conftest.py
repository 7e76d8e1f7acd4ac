"""Runs that the notebooks start go on in the background by design; here they end with the tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import rlkit


@pytest.fixture(scope="session", autouse=True)
def _end_runs_with_the_tests() -> Iterator[None]:
    yield
    runs = Path(__file__).parent / "runs"
    for run in rlkit.list_runs(runs) if runs.exists() else []:
        if run.alive:
            run.stop()
