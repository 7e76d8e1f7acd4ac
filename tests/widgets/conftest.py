"""A run folder to watch, and widgets whose messages are recorded instead of sent."""

from collections.abc import Iterator
from pathlib import Path

import comm
import ipywidgets
import pytest

from tests.widgets.fake_run import FakeRun
from tests.widgets.pages import RecorderComm


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    fake = FakeRun(tmp_path / "exp")
    yield fake
    fake.lock.release()
    fake.events.close()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Widgets made in the test get a recording comm, and are closed after it."""
    monkeypatch.setattr(comm, "create_comm", RecorderComm)
    yield
    ipywidgets.Widget.close_all()
