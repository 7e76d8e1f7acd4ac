"""The quickstart as a newcomer meets it: JupyterLab, Run All, a slider moved while it trains, a restarted kernel."""

import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Locator, expect

import rlkit
from rlkit.errors import RlkitError
from rlkit.runs.handle import Run
from tests.browser.cell_latency import cell_seconds
from tests.browser.lab import Lab
from tests.browser.notebook_page import CHROMIUM, NotebookPage, opened

REPOSITORY = Path(__file__).parents[2]
PICTURES = REPOSITORY / "artifacts" / "browser"
ATTACH = 'import rlkit; run = rlkit.attach("runs/quickstart"); rlkit.Dashboard(run)'
FIRST_POINT_TARGET_S, FIRST_POINT_LIMIT_S = 60, 180
CELL_TARGET_S, CELL_LIMIT_S = 0.3, 1.0
KEY_PRESSES = 20
STEP_LIMIT_S = 240.0
"""A step takes ten seconds on two cores, and many times that when other work shares them."""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    assert CHROMIUM.exists(), f"there is no browser at {CHROMIUM}: install it with `make system` (apt: chromium)"
    lab = Lab(tmp_path, REPOSITORY / "notebooks" / "01_quickstart.ipynb")
    try:
        lab.wait_until_up()
        yield lab
    finally:
        end_run(lab.work / "runs" / "quickstart")
        lab.close()


def end_run(folder: Path) -> None:
    """Leave no driver behind, whatever the test came to."""
    if not folder.exists():
        return
    run = rlkit.attach(folder)
    if not run.alive:
        return
    driver = run.status["pid"]
    try:
        run.stop(wait=False)
        run.wait(timeout=STEP_LIMIT_S)
    except RlkitError:
        if psutil.pid_exists(driver):
            psutil.Process(driver).kill()
        raise


def part(root: Locator, name: str) -> Locator:
    return root.locator(f'[data-rlkit="{name}"]')


def points(root: Locator) -> int:
    """Points of the mean reward in the drawn chart; 0 while there is no chart."""
    if not part(root, "plots-reward").locator("canvas").count():
        return 0
    return int(part(root, "plot-reward/mean").get_attribute("data-points") or 0)


def run_of(lab: Lab) -> Run:
    return rlkit.attach(lab.work / "runs" / "quickstart")


def wait_for_first_point(notebook: NotebookPage, root: Locator) -> float:
    """Seconds from the start of the run to the first point in the chart."""
    root.wait_for(state="attached", timeout=240_000)

    def drawn() -> bool:
        notebook.show(root)  # charts out of sight are not drawn, and Run All goes to the end
        return points(root) >= 1

    notebook.wait(drawn, "the first point", STEP_LIMIT_S)
    seen = time.time()
    return seen - float(run_of(notebook.lab).status["started"])


def move_slider(notebook: NotebookPage, root: Locator) -> tuple[float, int]:
    """Move the weight of `brevity` by keyboard and wait for the run's answer: the new weight and the step."""
    slider = part(root, "mixer-brevity")
    before = float(slider.input_value())
    slider.focus()
    for _ in range(KEY_PRESSES):
        notebook.page.keyboard.press("ArrowRight")
    after = float(slider.input_value())
    assert after > before, "the keys did not move the slider"
    state = part(root, "mixer-brevity-state")
    expect(state).to_have_text(re.compile(r"applied at step \d+"), timeout=1000 * STEP_LIMIT_S)
    expect(state).to_have_attribute("data-status", "applied")
    expect(part(root, "mixer-brevity-number")).to_have_value(f"{after:g}")
    return after, int(re.findall(r"\d+", state.inner_text())[0])


def check_recorded(run: Run, weight: float, step: int) -> None:
    """The folder must say what the page says."""
    answers = [event for event in run.events("request") if event["source"] == "widget"]
    newest: dict[str, Any] = answers[-1]
    assert (newest["kind"], newest["status"], newest["step"]) == ("set", "applied", step)
    assert newest["args"] == {"reward_weights": {"brevity": pytest.approx(weight)}}
    assert run.status["settings"]["reward_weights"]["brevity"] == pytest.approx(weight)


def test_quickstart_live_and_after_a_restart(lab: Lab) -> None:
    with opened(lab, PICTURES / "0_failure.png") as notebook:
        notebook.run_all()
        root = notebook.page.locator('[data-rlkit="root"]').first
        first = wait_for_first_point(notebook, root)
        print(f"\nfirst point {first:.1f} s after the start of the run (target {FIRST_POINT_TARGET_S} s)")
        assert first <= FIRST_POINT_LIMIT_S
        notebook.picture(root, PICTURES / "1_first_points.png")

        run = run_of(lab)
        assert run.state == "running"
        weight, step = move_slider(notebook, root)
        print(f"brevity moved to {weight:g} by keyboard, applied at step {step}")
        check_recorded(run, weight, step)
        notebook.wait_until_all_ran(2 * STEP_LIMIT_S)
        assert notebook.complaints() == []
        notebook.picture(root, PICTURES / "2_slider_moved.png")

        before, step_before = points(root), run.step_count
        notebook.restart_kernel()
        restored = notebook.add_and_run(ATTACH).locator('[data-rlkit="root"]')
        notebook.wait(lambda: points(restored) >= before, f"a chart with the {before} earlier points")
        notebook.wait(lambda: run.step_count > step_before, "a further step of the run", STEP_LIMIT_S)
        expect(part(restored, "status")).to_have_text("running")
        expect(part(restored, "mixer-brevity-number")).to_have_value(f"{weight:g}")
        drawn = points(restored)
        print(
            f"{drawn} points after the restart, {before} before it; the run went from step {step_before} to "
            f"{run.step_count} meanwhile"
        )

        seconds = cell_seconds(lab, "1+1", 50, lambda: notebook.page.wait_for_timeout(150))
        median = statistics.median(seconds)
        print(
            f"1+1: median of {len(seconds)} {median:.3f} s (target {CELL_TARGET_S} s), "
            f"from {min(seconds):.3f} to {max(seconds):.3f} s"
        )
        assert run.state == "running"
        assert median <= CELL_LIMIT_S
        notebook.picture(restored, PICTURES / "3_attached.png")
        assert notebook.complaints() == []
        assert notebook.outside == []
        assert notebook.script_errors == []
    run.stop()
    assert run.state == "stopped"
    assert lab.close() == []
