"""The built front-end in a bare page: it gets the messages that the kernel's side makes, and its answers are read."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import rlkit_widgets
from rlkit.runs import events
from rlkit.runs.protocol import StepMetrics
from rlkit_widgets.feed import Feed
from rlkit_widgets.state import RunState
from tests.widgets.fake_run import FakeRun
from tests.widgets.pages import RecorderPage

STATIC = Path(rlkit_widgets.__file__).parent / "static"
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
ALL_PANELS = ["status", "controls", "mixer", "plots", "rollouts"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium; `make system` installs it"),
]

# A model as anywidget hands it out, with a record of what the page sends and a way to deliver what the kernel sends.
FAKE_MODEL = """
async ([code, panels]) => {
  window.sent = [];
  const traits = { panels, run_name: "exp", snapshot_id: "rlkit-test" };
  const listeners = {};
  window.host = Object.create(Object.create({
    _handle_comm_msg(message) { window.deliver(...message); },
  }));
  window.host.comm = { on_msg(callback) { window.revived = callback; } };
  window.model = {
    get: (name) => traits[name],
    set(name) { (listeners["change:" + name] ?? []).forEach((callback) => callback(window.host)); },
    on(event, callback) { (listeners[event] ??= []).push(callback); },
    off(event, callback) { listeners[event] = (listeners[event] ?? []).filter((known) => known !== callback); },
    send(content) { window.sent.push(content); },
  };
  window.deliver = (content, buffers) => {
    const views = buffers.map((bytes) => new DataView(new Uint8Array(bytes).buffer));
    (listeners["msg:custom"] ?? []).forEach((callback) => callback(content, views));
  };
  const address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  const widget = (await import(address)).default;
  const forget = widget.initialize({ model: { ...window.model } });
  const remove = widget.render({ model: { ...window.model }, el: document.getElementById("host") });
  window.closeWidget = () => { remove(); forget(); };
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield started
        started.close()


class Bench:
    """A page with the widget in it, and the kernel's side of the same run."""

    def __init__(self, page: Page, run: FakeRun) -> None:
        self.page, self.run = page, run
        self.kernel = RecorderPage()
        self.feed = Feed(RunState(run.folder), self.kernel, with_rollouts=True)
        self._read = 0

    def at(self, name: str) -> Any:
        return self.page.locator(f'[data-rlkit="{name}"]')

    def exchange(self) -> list[dict[str, Any]]:
        """Carry what the page has sent to the kernel and the answers back. Returns what the page had sent."""
        sent: list[dict[str, Any]] = json.loads(self.page.evaluate("JSON.stringify(window.sent)"))[self._read :]
        self._read += len(sent)
        self.feed.turn(self.kernel, sent)
        for content, buffers in self.kernel.messages:
            self.page.evaluate("(message) => window.deliver(...message)", [content, [list(part) for part in buffers]])
        self.kernel.clear()
        return sent

    def requests(self, wait_ms: int = 400) -> list[dict[str, Any]]:
        """Requests that the page has sent, once its hand has rested."""
        self.page.wait_for_timeout(wait_ms)
        return [message for message in self.exchange() if message["kind"] == "request"]


def open_bench(browser: Browser, run: FakeRun, panels: list[str]) -> Bench:
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_content('<body data-jp-theme-light="true"><div id="host"></div></body>')
    page.add_style_tag(content=(STATIC / "dashboard.css").read_text(encoding="utf-8"))
    page.evaluate(FAKE_MODEL, [(STATIC / "dashboard.js").read_text(encoding="utf-8"), panels])
    return Bench(page, run)


@pytest.fixture
def bench(browser: Browser, run: FakeRun) -> Iterator[Bench]:
    for _ in range(12):
        run.take_step()
    made = open_bench(browser, run, ALL_PANELS)
    assert made.exchange()[0] == {"kind": "hello"}
    yield made
    made.page.close()


def test_the_page_shows_what_the_kernel_knows(bench: Bench) -> None:
    expect(bench.at("status")).to_have_text("running")
    expect(bench.at("step")).to_have_text("12")
    expect(bench.at("mixer-brevity-number")).to_have_value("0.5")
    expect(bench.at("setting-lr")).to_have_value("1e-6")
    for name in ("reward/mean", "reward/sentiment", "train/entropy", "rollout/response_length"):
        expect(bench.at(f"plot-{name}")).to_have_attribute("data-points", "12")
        expect(bench.at(f"plot-{name}")).to_have_attribute("data-last-step", "12")
    expect(bench.at("rollouts-step")).to_have_text("12")
    assert bench.at("rollouts").locator("tbody tr").count() == 8
    bench.run.take_step(extra={"eval/accuracy": 0.25})
    bench.exchange()
    expect(bench.at("step")).to_have_text("13")
    expect(bench.at("plot-eval/accuracy").locator(".rlk-value")).to_have_text("0.250")
    expect(bench.at("plot-train/entropy")).to_have_attribute("data-points", "13")


def test_arrow_keys_on_the_slider_become_one_request_pending_until_applied(bench: Bench) -> None:
    bench.page.clock.install()
    soon = datetime.fromtimestamp(bench.page.evaluate("Date.now()") / 1000 + 1, UTC)
    bench.page.clock.pause_at(soon)  # the page's time stands still while the keys are pressed
    bench.at("mixer-brevity").focus()
    for _ in range(4):
        bench.page.keyboard.press("ArrowRight")
    expect(bench.at("mixer-brevity-number")).to_have_value("0.54")
    assert bench.exchange() == []
    bench.page.clock.run_for(500)
    (request,) = bench.exchange()
    assert (request["kind"], request["request"]) == ("request", "set")
    assert request["args"] == {"reward_weights": {"brevity": 0.54}}
    bench.page.clock.run_for(100)
    expect(bench.at("mixer-brevity-state")).to_have_text("pending")
    bench.run.serve()
    bench.exchange()
    bench.page.clock.run_for(100)
    expect(bench.at("mixer-brevity-state")).to_have_text("applied at step 12")
    expect(bench.at("announcer")).to_have_text("brevity = 0.54 applied at step 12.")
    expect(bench.at("mixer-brevity")).to_have_value("0.54")
    expect(bench.at("mixer-sentiment-state")).to_have_text("")
    assert bench.page.evaluate("document.activeElement.dataset.rlkit") == "mixer-brevity"


def test_a_refusal_shows_its_reason_and_the_old_value(bench: Bench) -> None:
    bench.at("setting-temperature").fill("-3")
    bench.at("setting-temperature").press("Enter")
    (request,) = bench.requests()
    assert request["args"] == {"temperature": -3}
    bench.run.serve()
    bench.exchange()
    expect(bench.at("setting-temperature-state")).to_have_text("refused: temperature must lie in 0.01 to 5.0; got -3")
    bench.page.keyboard.press("Tab")
    expect(bench.at("setting-temperature")).to_have_value("1")


def test_a_change_from_elsewhere_moves_the_slider(bench: Bench) -> None:
    bench.run.ask("set", reward_weights={"sentiment": 3.5})
    bench.run.serve()
    bench.exchange()
    expect(bench.at("mixer-sentiment")).to_have_value("3.5")
    expect(bench.at("mixer-sentiment-number")).to_have_value("3.5")
    expect(bench.at("requests")).to_contain_text("sentiment = 3.5 applied at step 12, from python")


def test_buttons_follow_the_state_and_stop_takes_two_presses(bench: Bench) -> None:
    expect(bench.at("control-step")).to_be_disabled()
    bench.at("control-pause").click()
    assert [request["request"] for request in bench.requests()] == ["pause"]
    bench.run.serve()
    bench.exchange()
    expect(bench.at("status")).to_have_text("paused")
    bench.at("control-step-count").fill("3")
    bench.at("control-step").click()
    assert [(request["request"], request["args"]) for request in bench.requests()] == [("step", {"n": 3})]
    bench.at("control-stop").click()
    assert bench.requests() == []
    bench.at("control-stop").click()
    bench.at("control-resume").click()
    assert [request["request"] for request in bench.requests()] == ["stop", "resume"]


def test_a_finished_run_can_be_read_but_not_steered(bench: Bench) -> None:
    bench.run.set_state("finished")
    bench.exchange()
    expect(bench.at("status")).to_have_text("finished")
    for name in ("control-pause", "control-stop", "mixer-brevity", "setting-lr"):
        expect(bench.at(name)).to_be_disabled()
    expect(bench.at("rollouts-previous")).to_be_enabled()


def test_rollouts_are_browsed_sorted_and_opened(bench: Bench) -> None:
    bench.at("rollouts-previous").click()
    bench.exchange()
    expect(bench.at("rollouts-step")).to_have_text("11")
    bench.run.take_step()
    bench.exchange()
    expect(bench.at("rollouts-step")).to_have_text("11")
    bench.at("rollouts-latest").click()
    bench.exchange()
    expect(bench.at("rollouts-step")).to_have_text("13")
    rows = bench.at("rollouts").locator("tbody tr")
    bench.at("rollouts").locator('th button[data-key="reward"]').click()
    shown = [float(text.replace("−", "-")) for text in rows.locator("td.rlk-bar").all_inner_texts()]
    assert shown == sorted(shown, reverse=True)
    opener = rows.first.locator("button")
    opener.press("Enter")
    expect(bench.at("rollouts").locator('button[aria-expanded="true"]')).to_have_count(1)


def test_values_that_are_not_finite_are_named(bench: Bench) -> None:
    bench.run.take_step(extra={"train/entropy": float("nan")})
    bench.exchange()
    expect(bench.at("plot-train/entropy").locator(".rlk-value")).to_have_text("nan")


def test_a_long_history_stays_bounded_in_the_page(bench: Bench) -> None:
    for first in range(13, 4_613, 200):
        steps = (StepMetrics(step, {"train/entropy": 1.0}) for step in range(first, first + 200))
        bench.run.events.write(*(events.metrics(step) for step in steps))
        bench.exchange()
    points = int(bench.at("plot-train/entropy").get_attribute("data-points") or 0)
    assert 1_000 < points <= 4_000
    expect(bench.at("plot-train/entropy")).to_have_attribute("data-last-step", "4612")


def test_every_control_has_a_name_and_the_theme_is_followed(bench: Bench) -> None:
    nameless = bench.page.evaluate(
        """() => [...document.querySelectorAll("input, button, select")].filter((element) =>
            !element.getAttribute("aria-label") && !element.labels?.length && !element.textContent.trim()
        ).map((element) => element.outerHTML)"""
    )
    assert nameless == []
    assert bench.page.locator('.rlk-chart[role="img"]').first.get_attribute("aria-label")
    read = "getComputedStyle(document.querySelector('.rlk')).getPropertyValue('--rlk-accent')"
    draw = "document.querySelector('[data-rlkit=\"plot-train/entropy\"] canvas').toDataURL()"
    light = bench.page.evaluate(f"[{read}, {draw}]")
    bench.page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    bench.page.wait_for_timeout(200)
    dark = bench.page.evaluate(f"[{read}, {draw}]")
    assert light[0] != dark[0]
    assert light[1] != dark[1]


def test_keys_in_the_widget_do_not_reach_the_notebook(bench: Bench) -> None:
    bench.page.evaluate("document.addEventListener('keydown', (e) => (window.keys ??= []).push(e.key))")
    bench.at("mixer-brevity").focus()
    for key in ("ArrowUp", "d", "Control+s"):
        bench.page.keyboard.press(key)
    assert bench.page.evaluate("window.keys") == ["Control", "s"]


def test_the_static_view_hides_while_the_live_one_lives(bench: Bench) -> None:
    bench.page.evaluate(
        """() => document.body.insertAdjacentHTML("beforeend", '<p id="last" data-rlkit-snapshot="rlkit-test">x</p>')"""
    )
    expect(bench.page.locator("#last")).to_be_hidden()
    bench.page.evaluate("window.closeWidget()")
    expect(bench.page.locator("#last")).to_be_visible()
    assert bench.page.locator(".rlk").count() == 0


def test_panels_stand_alone(browser: Browser, run: FakeRun) -> None:
    run.take_step()
    bench = open_bench(browser, run, ["mixer"])
    bench.exchange()
    expect(bench.at("mixer-brevity")).to_be_enabled()
    assert bench.at("plots").count() == bench.at("status").count() == bench.at("rollouts").count() == 0
    bench.page.close()


def test_a_widget_that_the_host_left_deaf_asks_again_and_hears(browser: Browser, run: FakeRun) -> None:
    bench = open_bench(browser, run, ["status"])
    bench.page.wait_for_function("window.revived && window.sent.length >= 2", timeout=20_000)
    assert bench.page.evaluate("window.sent.every((message) => message.kind === 'hello')")
    bench.feed.turn(bench.kernel, [{"kind": "hello"}])
    bench.page.evaluate("(message) => window.revived(message)", [bench.kernel.messages[0][0], []])
    expect(bench.at("status")).to_have_text("running")
    bench.page.close()
