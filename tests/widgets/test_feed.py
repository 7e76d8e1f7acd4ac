import gc
import shutil
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from rlkit_widgets.feed import PERIOD_S, Feed
from rlkit_widgets.state import RunState
from tests.widgets.fake_run import FakeRun
from tests.widgets.pages import RecorderPage, decode, eventually


@pytest.fixture
def page() -> RecorderPage:
    return RecorderPage()


@pytest.fixture
def feed(run: FakeRun, page: RecorderPage) -> Iterator[Feed]:
    made = Feed(RunState(run.folder), page, with_rollouts=True)
    yield made
    made.close()


def test_nothing_is_sent_before_a_page_asks(run: FakeRun, feed: Feed, page: RecorderPage) -> None:
    run.take_step()
    feed.turn(page, [])
    assert page.messages == []
    assert page.adopted[0].points


def test_hello_brings_status_history_and_rollouts(run: FakeRun, feed: Feed, page: RecorderPage) -> None:
    for _ in range(5):
        run.take_step()
    feed.turn(page, [{"kind": "hello"}])
    (hello,) = page.of("hello")
    assert hello["run"] == "exp"
    assert hello["status"]["step"] == 5
    assert hello["settings"]["reward_weights"] == {"sentiment": 1.0, "brevity": 0.5}
    assert hello["specs"]["temperature"]["max"] == 5.0
    assert len(decode(page.messages)["reward/mean"]) == 5
    assert page.of("rollouts")[0]["step"] == 5


def test_a_page_that_asks_again_gets_everything_again(run: FakeRun, feed: Feed, page: RecorderPage) -> None:
    run.take_step()
    feed.turn(page, [{"kind": "hello"}])
    run.take_step()
    feed.turn(page, [])
    page.clear()
    feed.turn(page, [{"kind": "hello"}])
    assert [step for step, _ in decode(page.messages)["reward/mean"]] == [1, 2]


def test_a_request_goes_round(run: FakeRun, feed: Feed, page: RecorderPage) -> None:
    feed.turn(page, [{"kind": "hello"}])
    args = {"reward_weights": {"brevity": 0.9}}
    feed.turn(page, [{"kind": "request", "nonce": "a-1", "request": "set", "args": args}])
    (note,) = page.of("tick")[-1]["requests"]
    assert (note["nonce"], note["status"], note["args"]) == ("a-1", "pending", args)
    run.take_step()
    run.serve()
    feed.turn(page, [])
    tick = page.of("tick")[-1]
    (answer,) = tick["requests"]
    assert (answer["id"], answer["status"], answer["step"]) == (note["id"], "applied", 1)
    assert tick["settings"]["reward_weights"] == {"sentiment": 1.0, "brevity": 0.9}


def test_a_request_that_comes_with_the_hello_is_not_lost(run: FakeRun, feed: Feed, page: RecorderPage) -> None:
    letter = {"kind": "request", "nonce": "a-1", "request": "set", "args": {"lr": 2e-6}}
    feed.turn(page, [letter, {"kind": "hello"}])
    notes = page.of("hello")[0]["requests"] + page.of("tick")[0]["requests"]
    assert {note["nonce"] for note in notes} == {"a-1"}
    run.serve()
    feed.turn(page, [])
    feed.turn(page, [{"kind": "hello"}])
    (note,) = page.of("hello")[1]["requests"]
    assert (note["nonce"], note["status"]) == ("a-1", "applied")


def test_a_refusal_brings_its_reason_and_the_run_keeps_its_settings(
    run: FakeRun, feed: Feed, page: RecorderPage
) -> None:
    feed.turn(page, [{"kind": "hello"}])
    args = {"reward_weights": {"brevty": 1.0}}
    feed.turn(page, [{"kind": "request", "nonce": "a-1", "request": "set", "args": args}])
    run.serve()
    feed.turn(page, [])
    tick = page.of("tick")[-1]
    assert tick["requests"][0]["status"] == "refused"
    assert "did you mean 'brevity'" in tick["requests"][0]["reason"]
    assert "settings" not in tick


def test_requests_of_others_are_shown_too(run: FakeRun, feed: Feed, page: RecorderPage) -> None:
    feed.turn(page, [{"kind": "hello"}])
    run.ask("set", lr=3e-6)
    run.serve()
    feed.turn(page, [])
    (note,) = page.of("tick")[-1]["requests"]
    assert (note["source"], note["args"], note["status"]) == ("python", {"lr": 3e-6}, "applied")


def test_a_run_that_ended_and_an_unknown_request_are_refused_on_the_spot(
    run: FakeRun, feed: Feed, page: RecorderPage
) -> None:
    feed.turn(page, [{"kind": "hello"}, {"kind": "request", "nonce": "a-0", "request": "explode", "args": {}}])
    run.set_state("finished")
    feed.turn(page, [])
    feed.turn(page, [{"kind": "request", "nonce": "a-1", "request": "pause", "args": {}}])
    (note,) = page.of("tick")[-1]["requests"]
    assert (note["nonce"], note["status"], note["reason"]) == ("a-1", "refused", "the run has finished")
    assert not run.folder.control.exists()


def test_rollouts_follow_the_newest_step_until_another_is_asked_for(
    run: FakeRun, feed: Feed, page: RecorderPage
) -> None:
    run.take_step()
    feed.turn(page, [{"kind": "hello"}])
    run.take_step()
    feed.turn(page, [])
    feed.turn(page, [{"kind": "rollouts", "step": 1}])
    run.take_step()
    feed.turn(page, [])
    feed.turn(page, [{"kind": "rollouts", "step": None}])
    assert [message["step"] for message in page.of("rollouts")] == [1, 2, 1, 3]
    feed.turn(page, [{"kind": "rollout", "step": 2, "place": 0}])
    assert page.of("rollout")[0]["prompt"]


def test_an_error_is_told_once_and_the_feed_goes_on(run: FakeRun, feed: Feed, page: RecorderPage) -> None:
    feed.turn(page, [{"kind": "hello"}])
    hidden = run.folder.status.rename(run.folder.root / "away")
    feed.turn(page, [])
    feed.turn(page, [])
    (error,) = page.of("error")
    assert "cannot be read as a status" in error["message"]
    hidden.rename(run.folder.status)
    run.take_step()
    feed.turn(page, [])
    assert page.of("tick")[-1]["status"]["step"] == 1


def test_the_number_of_messages_is_bounded_by_the_clock_not_by_the_steps(
    run: FakeRun, feed: Feed, page: RecorderPage
) -> None:
    feed.start()
    feed.post({"kind": "hello"})
    eventually(lambda: page.of("hello"))
    begun = time.monotonic()
    for _ in range(1_000):
        run.take_step(rows=0)
    eventually(lambda: decode(page.messages).get("train/lr", [(0, 0)])[-1][0] == 1_000)
    elapsed = time.monotonic() - begun
    assert len(page.of("tick")) <= elapsed / PERIOD_S + 2


def test_post_returns_at_once_and_wakes_the_feed(run: FakeRun, feed: Feed, page: RecorderPage) -> None:
    feed.start()
    feed.post({"kind": "hello"})
    eventually(lambda: page.of("hello"))
    for number in range(20):
        feed.post({"kind": "request", "nonce": f"n-{number}", "request": "pause", "args": {}})
    eventually(lambda: run.folder.control.exists() and len(run.folder.control.read_bytes().splitlines()) == 20)


def test_a_page_that_hears_nothing_else_is_told_that_the_kernel_lives(
    run: FakeRun, feed: Feed, page: RecorderPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit_widgets.feed.KEEPALIVE_S", 0.05)
    run.set_state("finished")
    feed.turn(page, [{"kind": "hello"}])
    feed.turn(page, [])
    assert page.of("tick") == []
    time.sleep(0.06)
    feed.turn(page, [])
    assert page.of("tick")[0]["status"]["state"] == "finished"


def test_close_ends_the_thread_and_so_does_dropping_the_page(run: FakeRun, page: RecorderPage) -> None:
    before = threading.active_count()
    closed = Feed(RunState(run.folder), page, with_rollouts=False)
    closed.start()
    closed.close()
    assert not closed.alive
    dropped_page = RecorderPage()
    dropped = Feed(RunState(run.folder), dropped_page, with_rollouts=False)
    dropped.start()
    reference = weakref.ref(dropped_page)
    del dropped_page
    gc.collect()
    eventually(lambda: not dropped.alive)
    assert reference() is None
    assert threading.active_count() == before


def test_a_folder_that_was_removed_does_not_end_the_feed(run: FakeRun, feed: Feed, page: RecorderPage) -> None:
    feed.start()
    feed.post({"kind": "hello"})
    eventually(lambda: page.of("hello"))
    shutil.rmtree(run.folder.root)
    assert eventually(lambda: page.of("error"))
    assert feed.alive
