"""Interrupting a run: it ends at once, says what it could not stop, and leaves neither threads nor batches behind."""

import gc
import random
import signal
import threading
import time
import warnings
import weakref
from typing import Any

import pytest
import torch

from rlkit import RewardError
from rlkit.batch import RolloutBatch
from rlkit.dataflow import Dataflow
from rlkit.pipeline import Pipeline
from tests.dataflow.fakes import Actor, Step, StreamingActor, chain, length_reward, prompts


def spin_until(event: threading.Event) -> None:
    """Python code that runs until told otherwise and can be stopped between two of its steps."""
    deadline = time.monotonic() + 60
    while not event.is_set() and time.monotonic() < deadline:
        pass


def interrupt(*_: Any) -> None:
    """What Ctrl-C and a kernel's interrupt do: the signal reaches the main thread, whoever sends it."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def beside(first: Any, second: Any) -> Pipeline:
    """Two independent controllers: the first, heavy, in the calling thread; the second in a thread of its own."""
    return Pipeline(Dataflow().add(Step("caller", fn=first, heavy=True), Step("worker", fn=second)))


def test_an_interrupt_in_the_calling_thread_stops_python_code_in_the_others():
    never, running = threading.Event(), threading.Event()
    before = threading.active_count()

    def work(batch: RolloutBatch) -> dict[str, Any]:
        running.set()
        spin_until(never)
        return {}

    def interrupted(batch: RolloutBatch) -> dict[str, Any]:
        assert running.wait(20)
        interrupt()
        spin_until(never)
        return {}

    with pytest.raises(KeyboardInterrupt):
        beside(interrupted, work).run(prompts())
    assert threading.active_count() == before


def test_an_interrupt_while_the_calling_thread_waits():
    never = threading.Event()
    before = threading.active_count()

    def work(batch: RolloutBatch) -> dict[str, Any]:
        interrupt()
        spin_until(never)
        return {}

    with pytest.raises(KeyboardInterrupt):
        beside(lambda batch: {}, work).run(prompts())
    assert threading.active_count() == before


def test_an_interrupt_while_rows_stream():
    never = threading.Event()
    before = threading.active_count()
    reward = length_reward()
    reward.fn = lambda batch: spin_until(never)

    def between(rows: Any) -> None:
        interrupt()
        spin_until(never)

    with pytest.raises(KeyboardInterrupt):
        Pipeline(chain(StreamingActor([[0]], between), reward)).run(prompts())
    assert threading.active_count() == before


def test_a_second_interrupt_gives_up_on_what_cannot_be_stopped_and_names_it():
    release, inside = threading.Event(), threading.Event()

    def work(batch: RolloutBatch) -> dict[str, Any]:
        inside.set()
        release.wait(60)  # one call into C: no exception reaches it before it returns
        return {}

    def interrupted(batch: RolloutBatch) -> dict[str, Any]:
        assert inside.wait(20)
        threading.Timer(0.5, interrupt).start()
        raise KeyboardInterrupt

    try:
        with (
            pytest.warns(RuntimeWarning, match="gave up waiting for 'worker', running in a thread that cannot be stop"),
            pytest.raises(KeyboardInterrupt),
        ):
            beside(interrupted, work).run(prompts())
        left = [thread for thread in threading.enumerate() if thread.name == "rlkit-worker"]
        assert [thread.daemon for thread in left] == [True]
    finally:
        release.set()
        for thread in left:
            thread.join(20)


def test_after_a_failure_running_controllers_end_by_themselves_and_the_failure_is_raised():
    inside, ended = threading.Event(), []

    def work(batch: RolloutBatch) -> dict[str, Any]:
        inside.set()
        threading.Event().wait(0.1)
        ended.append(True)
        return {}

    def fail(batch: RolloutBatch) -> dict[str, Any]:
        assert inside.wait(20)
        raise RewardError("no")

    with pytest.raises(RewardError, match="'caller' failed: no"):
        beside(fail, work).run(prompts())
    assert ended == [True]


def test_an_interrupt_while_waiting_after_a_failure_keeps_the_failure():
    never, inside = threading.Event(), threading.Event()

    def work(batch: RolloutBatch) -> dict[str, Any]:
        inside.set()
        spin_until(never)
        return {}

    def fail(batch: RolloutBatch) -> dict[str, Any]:
        assert inside.wait(20)
        threading.Timer(0.3, interrupt).start()
        raise RewardError("no")

    before = threading.active_count()
    with pytest.raises(RewardError, match="'caller' failed: no"):
        beside(fail, work).run(prompts())
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(20)
    assert threading.active_count() == before


def test_an_exit_in_a_thread_is_not_turned_into_an_error():
    def leave(batch: RolloutBatch) -> dict[str, Any]:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        beside(lambda batch: {}, leave).run(prompts())
    assert caught.value.code == 3


def test_interrupted_five_times_and_run_again_no_tensor_is_left():
    interrupt_now = True
    kept: list[BaseException] = []

    def maybe(batch: RolloutBatch) -> dict[str, Any]:
        large = torch.ones(100_000)
        seen.append(weakref.ref(large))
        if interrupt_now:
            raise KeyboardInterrupt
        return {"rewards": large[: batch.batch_size]}

    seen: list[weakref.ref[Any]] = []
    actor = StreamingActor([[0], [1]])
    flow = chain(actor, length_reward()).connect(actor.output, Step("maybe", (), ("rewards",), maybe, heavy=True).input)
    pipeline = Pipeline(flow)
    gc.collect()
    before = count_of(RolloutBatch)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt) as caught:
            pipeline.run(prompts())
        kept.append(caught.value)
    gc.collect()
    assert [ref() for ref in seen] == [None] * 5
    assert count_of(RolloutBatch) == before
    interrupt_now = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipeline.run(prompts()).rewards.tolist() == [1.0] * 4


def count_of(kind: type) -> int:
    return sum(type(thing) is kind for thing in gc.get_objects())


def test_a_finished_run_keeps_nothing():
    pipeline = Pipeline(chain(Actor(), length_reward()))
    before = count_of(RolloutBatch)
    done = pipeline.run(prompts())
    gc.collect()
    assert count_of(RolloutBatch) == before + 1
    del done
    assert count_of(RolloutBatch) == before


def test_interrupts_at_any_moment_leave_no_thread_and_a_pipeline_that_works():
    actor = StreamingActor([[0], [1], [2], [3]])
    mixer = Step("mixer", ("reward/a", "reward/b"), ("rewards",))
    mixer.fn = lambda batch: {"rewards": batch["reward/a"] + batch["reward/b"]}
    flow = Dataflow().connect(actor.output, Step("beside", heavy=True).input)
    for reward in (length_reward("a"), length_reward("b")):
        flow.connect(actor.output, reward.input).connect(reward.output, mixer.input)
    pipeline, start = Pipeline(flow), prompts()
    rng = random.Random(0)

    def interrupt_later(seconds: float) -> None:
        time.sleep(seconds)
        interrupt()

    def run_on(pipeline: Pipeline, start: RolloutBatch) -> None:
        deadline = time.monotonic() + 60  # a lost interrupt fails the test instead of hanging it
        while time.monotonic() < deadline:
            pipeline.run(start)

    before = threading.active_count()
    for _ in range(40):
        sender = threading.Thread(target=interrupt_later, args=(0.05 + 0.03 * rng.random(),))
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            run_on(pipeline, start)
        sender.join()
        assert threading.active_count() == before
    assert pipeline.run(start).rewards.tolist() == [2, 4, 6, 8]
