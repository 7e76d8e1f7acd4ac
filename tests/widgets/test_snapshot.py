import base64
import re
from typing import Any

import pytest

from rlkit_widgets import Dashboard
from rlkit_widgets.snapshot import Snapshot, leading, render
from rlkit_widgets.state import RunState
from tests.widgets.fake_run import FakeRun
from tests.widgets.pages import eventually


class FakeShell:
    """An IPython shell of a kernel, as far as displays go."""

    kernel = object()

    def __init__(self) -> None:
        self.published: list[dict[str, Any]] = []
        self.display_pub = self

    def publish(self, data: dict[str, str], transient: dict[str, str], update: bool) -> None:
        self.published.append({"data": data, "id": transient["display_id"], "update": update})


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> FakeShell:
    made = FakeShell()
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: made)
    return made


def looked(run: FakeRun) -> RunState:
    state = RunState(run.folder)
    state.look()
    return state


def test_the_view_says_what_the_run_did_and_draws_it(run: FakeRun) -> None:
    for _ in range(30):
        run.take_step(rows=0)
    run.set_state("finished", "took all <b>its</b> steps")
    html = render(looked(run))
    assert "<b>exp</b>: finished (took all &lt;b&gt;its&lt;/b&gt; steps), step 30 of 200" in html
    assert "sentiment 1, brevity 0.5" in html
    source = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert source is not None
    svg = base64.b64decode(source.group(1)).decode()
    assert svg.count("<text") == 12
    assert "reward/mean" in svg
    assert re.search(r'alt="Last values: reward/mean -?[0-9.e-]+; ', html)
    assert len(html) < 40_000


def test_a_gap_breaks_the_line(run: FakeRun) -> None:
    for value in (1.0, 2.0, float("nan"), 3.0, 4.0):
        run.take_step(extra={"train/loss": value}, rows=0)
    state = looked(run)
    state.series = {"train/loss": state.series["train/loss"]}
    source = re.search(r"base64,([^\"]+)", render(state))
    assert source is not None
    path = re.findall(r'<path d="(M[^"]+)" fill="none"', base64.b64decode(source.group(1)).decode())
    assert path[0].count("M") == 2


def test_a_run_without_points_is_named(run: FakeRun) -> None:
    html = render(looked(run))
    assert "step 0 of 200" in html
    assert "<img" not in html


def test_leading_metrics_are_the_rewards_and_one_per_headline() -> None:
    names = ["memory/rss_mb", "train/entropy", "reward/brevity", "kl/coef", "reward/latency_ms", "reward/mean"]
    names += ["kl/per_token", "kl/per_response", "train/policy_loss", "train/value_loss", "reward/std", "reward/c"]
    assert leading(names) == [
        "reward/mean",
        "reward/brevity",
        "reward/c",
        "kl/per_token",
        "train/entropy",
        "train/policy_loss",
    ]


def test_the_folder_is_named_as_one_would_type_it(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"Dashboard(&#x27;{run.folder.root}&#x27;)" in render(looked(run))
    monkeypatch.chdir(run.folder.root.parent)
    assert "Dashboard(&#x27;exp&#x27;)" in render(looked(run))


def test_without_a_kernel_nothing_is_published(run: FakeRun) -> None:
    snapshot = Snapshot("exp")
    snapshot.show()
    snapshot.refresh(looked(run))
    snapshot.finish(looked(run))


def test_it_is_refreshed_rarely_at_a_change_of_state_and_at_the_end(run: FakeRun, shell: FakeShell) -> None:
    snapshot = Snapshot("exp")
    state = looked(run)
    snapshot.refresh(state)
    assert shell.published == []
    snapshot.show()
    for _ in range(5):
        snapshot.refresh(state)
    assert [entry["update"] for entry in shell.published] == [False, True]
    assert {entry["id"] for entry in shell.published} == {snapshot.identifier}
    run.set_state("stopped")
    state.look()
    snapshot.refresh(state)
    assert "stopped" in shell.published[-1]["data"]["text/html"]
    snapshot.finish(state)
    snapshot.finish(state)
    assert len(shell.published) == 4
    assert all(f'data-rlkit-snapshot="{snapshot.identifier}"' in e["data"]["text/html"] for e in shell.published)


@pytest.mark.usefixtures("recorded")
def test_showing_a_widget_puts_its_static_view_beside_it(run: FakeRun, shell: FakeShell) -> None:
    run.take_step()
    dashboard = Dashboard(run.folder.root)
    bundle = dashboard._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == dashboard.model_id
    eventually(lambda: any(entry["update"] for entry in shell.published))
    assert dashboard.snapshot_id in shell.published[0]["data"]["text/html"]
    run.take_step()
    eventually(lambda: dashboard.step == 2)
    dashboard.close()
    assert "step 2 of 200" in shell.published[-1]["data"]["text/html"]
