import math

import pytest

from rlkit.runs import events
from rlkit.runs.protocol import StepMetrics
from rlkit_widgets.messages import HISTORY_POINTS, TICK_LIMIT, Encoder
from rlkit_widgets.series import PAGE_LIMIT
from rlkit_widgets.state import RunState
from tests.widgets.fake_run import FakeRun
from tests.widgets.pages import decode, message_bytes


def write_steps(run: FakeRun, first: int, last: int, metrics: int = 12) -> None:
    steps = range(first, last + 1)
    names = [f"train/m{place:02d}" for place in range(metrics)]
    run.events.write(
        *(events.metrics(StepMetrics(step, {name: math.sin(step / 9.0) for name in names})) for step in steps)
    )


def test_history_and_ticks_bring_every_point_of_a_short_run(run: FakeRun) -> None:
    state = RunState(run.folder)
    encoder = Encoder(state)
    write_steps(run, 1, 40)
    state.look()
    messages = list(encoder.history())
    write_steps(run, 41, 43)
    messages.append(encoder.tick(state.look()))
    points = decode(messages)
    assert [step for step, _ in points["train/m03"]] == list(range(1, 44))
    assert points["train/m03"][6][1] == pytest.approx(math.sin(7 / 9.0), abs=1e-6)
    assert len(points) == 12


def test_a_new_name_is_introduced_once(run: FakeRun) -> None:
    state = RunState(run.folder)
    encoder = Encoder(state)
    write_steps(run, 1, 2, metrics=2)
    state.look()
    (first,) = encoder.history()
    assert first[0]["names"] == [(0, "train/m00"), (1, "train/m01")]
    write_steps(run, 3, 3, metrics=3)
    tick = encoder.tick(state.look())
    assert tick[0]["names"] == [(2, "train/m02")]
    write_steps(run, 4, 4, metrics=3)
    assert encoder.tick(state.look())[0]["names"] == []


def test_bytes_of_a_tick_do_not_grow_with_the_history(run: FakeRun) -> None:
    state = RunState(run.folder)
    encoder = Encoder(state)
    sizes = []
    for first, last in ((1, 9), (10, 99), (100, 999), (1_000, 11_999)):
        write_steps(run, first, last)
        state.look()
        list(encoder.history())
        write_steps(run, last + 1, last + 1)
        sizes.append(message_bytes(encoder.tick(state.look())))
    assert max(sizes) - min(sizes) <= 8  # the pace may be said in more or fewer digits
    assert max(sizes) < 12 * (8 + 4) + 400


def test_a_burst_and_a_long_history_stay_bounded(run: FakeRun) -> None:
    state = RunState(run.folder)
    encoder = Encoder(state)
    write_steps(run, 1, 9_000, metrics=25)
    burst = encoder.tick(state.look())
    assert all(count <= TICK_LIMIT for _, count in burst[0]["series"])
    history = list(encoder.history())
    for message in history:
        assert sum(count for _, count in message[0]["series"]) < HISTORY_POINTS + PAGE_LIMIT
        assert all(count <= PAGE_LIMIT for _, count in message[0]["series"])
        assert message_bytes(message) < 12 * (HISTORY_POINTS + PAGE_LIMIT) + 2_000
    points = decode([burst, *history])
    assert len(points) == 25
    assert points["train/m24"][0][0] == 1
    assert points["train/m24"][-1][0] == 9_000


def test_a_quiet_tick_is_small_and_says_how_the_run_stands(run: FakeRun) -> None:
    state = RunState(run.folder)
    encoder = Encoder(state)
    state.look()
    content, buffers = encoder.tick(state.look())
    assert buffers == []
    assert set(content) == {"kind", "status"}
    assert content["status"]["state"] == "running"
    assert content["status"]["alive"] is True
    assert message_bytes((content, buffers)) < 300
