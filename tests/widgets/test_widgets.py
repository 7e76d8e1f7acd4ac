import gc
import threading
import weakref
from typing import Any

import ipywidgets
import pytest
from ipywidgets.widgets import widget as registry
from traitlets import TraitError

import rlkit_widgets
from rlkit.errors import RunError
from rlkit_widgets import Dashboard, MetricPlots, RewardMixer, RolloutBrowser, RunControls
from tests.widgets.fake_run import FakeRun
from tests.widgets.pages import decode, eventually, press

pytestmark = pytest.mark.usefixtures("recorded")
KINDS = (Dashboard, RewardMixer, RunControls, MetricPlots, RolloutBrowser)


def feeds() -> int:
    return sum(thread.name.startswith("rlkit feed") for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("kind", "panels"),
    [
        (Dashboard, ["status", "controls", "mixer", "plots", "rollouts"]),
        (RunControls, ["status", "controls"]),
        (RewardMixer, ["mixer"]),
        (MetricPlots, ["plots"]),
        (RolloutBrowser, ["rollouts"]),
    ],
)
def test_all_are_one_bundle_with_other_panels(kind: Any, panels: list[str], run: FakeRun) -> None:
    widget = kind(run.folder.root)
    assert widget.panels == panels
    opened = widget.comm.sent[0]["data"]["state"]
    assert opened["panels"] == panels
    assert opened["run_name"] == "exp"
    assert "export{" in opened["_esm"] or "export {" in opened["_esm"]
    assert ".rlk" in opened["_css"]
    assert opened["_view_module"] == "anywidget"


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_keywords_are_type_errors(kind: Any, run: FakeRun) -> None:
    before = feeds()
    with pytest.raises(TypeError, match=r"takes no keyword 'layuot'; did you mean 'layout'\?"):
        kind(run.folder.root, layuot={})
    with pytest.raises(TypeError, match="give a Run or the path"):
        kind(object())
    with pytest.raises(RunError, match="no run folder"):
        kind(run.folder.root / "nowhere")
    assert feeds() == before


def test_widgets_compose_and_take_a_layout(run: FakeRun) -> None:
    mixer = RewardMixer(run.folder.root, layout={"width": "320px"})
    box = ipywidgets.HBox([mixer, MetricPlots(run.folder.root, "reward/*")])
    assert box.children[0] is mixer
    assert mixer.layout.width == "320px"
    box.close()


def test_traits_follow_the_run_and_can_be_observed(run: FakeRun) -> None:
    dashboard = Dashboard(run.folder.root)
    seen: list[int] = []
    eventually(lambda: dashboard.settings)
    dashboard.observe(lambda change: seen.append(change["new"]), "step")
    run.take_step()
    eventually(lambda: seen == [1])
    assert (dashboard.state, dashboard.total_steps) == ("running", 200)
    run.ask("set", lr=4e-6)
    run.serve()
    eventually(lambda: dashboard.last_request.get("status") == "applied")
    eventually(lambda: dashboard.settings["lr"] == 4e-6)


def test_hello_from_the_page_is_answered_over_the_comm(run: FakeRun) -> None:
    for _ in range(3):
        run.take_step()
    dashboard = Dashboard(run.folder.root)
    press(dashboard, kind="hello")
    eventually(lambda: dashboard.comm.custom("rollouts"))
    assert dashboard.comm.custom("hello")[0]["run"] == "exp"
    history = [
        (sent["data"]["content"], sent["buffers"])
        for sent in dashboard.comm.sent
        if sent["data"].get("content", {}).get("kind") == "history"
    ]
    assert len(decode(history)["reward/mean"]) == 3


def test_the_mixer_goes_from_pending_to_applied(run: FakeRun) -> None:
    mixer = RewardMixer(run.folder.root)
    press(mixer, kind="hello")
    eventually(lambda: mixer.value == {"sentiment": 1.0, "brevity": 0.5})
    press(mixer, kind="request", nonce="p-1", request="set", args={"reward_weights": {"sentiment": 0.2}})
    eventually(lambda: any(note.get("requests") for note in mixer.comm.custom("tick")))
    assert mixer.value["sentiment"] == 1.0
    run.serve()
    eventually(lambda: mixer.value == {"sentiment": 0.2, "brevity": 0.5})


def test_setting_value_asks_the_run_and_a_refusal_takes_it_back(run: FakeRun) -> None:
    mixer = RewardMixer(run.folder.root)
    eventually(lambda: mixer.value)
    mixer.value = {"sentiment": 0.25, "brevity": 0.5}
    eventually(run.folder.control.exists)
    run.serve()
    eventually(lambda: mixer.settings["reward_weights"] == {"sentiment": 0.25, "brevity": 0.5})
    mixer.value = {"sentiment": 0.25, "fluency": 1.0}
    eventually(lambda: len(run.folder.control.read_bytes().splitlines()) == 2)
    run.serve()
    eventually(lambda: mixer.value == {"sentiment": 0.25, "brevity": 0.5})
    assert mixer.last_request["status"] == "refused"
    with pytest.raises(TraitError):
        mixer.value = {"sentiment": "much"}


def test_plots_follow_only_their_patterns(run: FakeRun) -> None:
    run.take_step()
    plots = MetricPlots(run.folder.root, "kl", "train/entropy")
    press(plots, kind="hello")
    (history,) = eventually(lambda: plots.comm.custom("history"))
    assert sorted(name for _, name in history["names"]) == ["kl/coef", "kl/per_token", "train/entropy"]


def test_making_it_again_closes_the_previous_one(run: FakeRun) -> None:
    first = Dashboard(run.folder.root)
    mixer = RewardMixer(run.folder.root)
    second = Dashboard(str(run.folder.root))
    assert first.comm is None
    assert mixer.comm is not None
    assert second.comm is not None
    assert feeds() == 2


def test_build_and_close_leaves_nothing_behind(run: FakeRun) -> None:
    for _ in range(2):
        Dashboard(run.folder.root).close()
    gc.collect()
    widgets, threads = len(registry._instances), threading.active_count()
    references = []
    for _ in range(20):
        dashboard = Dashboard(run.folder.root)
        dashboard.observe(lambda change: None, "step")
        press(dashboard, kind="hello")
        references.append(weakref.ref(dashboard))
        dashboard.close()
        dashboard.close()
        del dashboard
    assert len(registry._instances) == widgets
    assert threading.active_count() == threads
    gc.collect()
    assert [reference for reference in references if reference() is not None] == []


def test_rebuilding_without_closing_leaves_one(run: FakeRun) -> None:
    widgets, threads = len(registry._instances), threading.active_count()
    references = []
    for _ in range(20):
        references.append(weakref.ref(Dashboard(run.folder.root)))
    assert len(registry._instances) == widgets + 2  # the widget and its layout
    assert threading.active_count() == threads + 1
    gc.collect()
    assert sum(reference() is not None for reference in references) == 1


def test_closing_never_touches_the_run(run: FakeRun) -> None:
    dashboard = Dashboard(run.folder.root)
    press(dashboard, kind="hello")
    eventually(lambda: dashboard.comm.custom("hello"))
    dashboard.close()
    assert not run.folder.control.exists()
    assert run.serve() == 0
    run.take_step()
    assert run.state == "running"


def test_a_closed_widget_ignores_presses_and_says_so(run: FakeRun) -> None:
    mixer = RewardMixer(run.folder.root)
    eventually(lambda: mixer.value)
    mixer.close()
    press(mixer, kind="request", nonce="x", request="pause", args={})
    assert not run.folder.control.exists()


def test_public_names() -> None:
    assert rlkit_widgets.__all__ == [
        "Dashboard",
        "MetricPlots",
        "RewardMixer",
        "RolloutBrowser",
        "RunControls",
        "RunWidget",
    ]
