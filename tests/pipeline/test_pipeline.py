"""Running a dataflow: order, overlap, streaming, stopping. Overlap is proved by rendezvous, never by the clock."""

import gc
import threading
import weakref
from typing import Any

import cloudpickle
import pytest
import torch

from rlkit import DataError, DataflowError, DeviceMap, RewardError, RlkitError
from rlkit.batch import Field, RolloutBatch
from rlkit.dataflow import Dataflow
from rlkit.pipeline import Pipeline, StageError
from tests.dataflow.fakes import DOUBLE, Actor, Spans, Step, StreamingActor, chain, length_reward, prompts

SCORE = Field("score", ("B",), "float32", "a number")


@pytest.fixture(autouse=True)
def _one_thread_and_none_left():
    torch.set_num_threads(1)
    before = threading.active_count()
    yield
    assert threading.active_count() == before, [thread.name for thread in threading.enumerate()]


def ones(name: str):
    return lambda batch: {name: torch.ones(batch.batch_size)}


def test_chain_gives_the_fields_worked_out_by_hand_in_stage_order():
    double = Step("double", ("reward/length",), (DOUBLE,), lambda batch: {"double": 2 * batch["reward/length"]})
    start = prompts(3)
    done = Pipeline(chain(Actor(), length_reward(), double)).run(start)
    assert done["responses"] == ["x", "xx", "xxx"]
    assert done["generated_ids"].tolist() == [
        [0, 1, 2, 0, 0, 0],
        [10, 11, 12, 10, 11, 0],
        [20, 21, 22, 20, 21, 22],
    ]
    assert done["reward/length"].tolist() == [1, 2, 3]
    assert done["double"].tolist() == [2, 4, 6]
    assert done.names[len(start.names) :] == (
        "generated_ids",
        "response_mask",
        "responses",
        "reward/length",
        "double",
    )
    assert start.names == prompts(3).names


def test_order_of_the_result_does_not_depend_on_who_finishes_first():
    slow_may_end = threading.Event()

    def slow(batch: RolloutBatch) -> dict[str, Any]:
        assert slow_may_end.wait(20)
        return {"reward/slow": torch.zeros(batch.batch_size)}

    def quick(batch: RolloutBatch) -> dict[str, Any]:
        slow_may_end.set()
        return {"reward/quick": torch.zeros(batch.batch_size)}

    actor = Actor()
    flow = Dataflow()
    for reward in (Step("slow", (), ("reward/slow",), slow), Step("quick", (), ("reward/quick",), quick)):
        flow.connect(actor.output, reward.input)
    assert Pipeline(flow).run(prompts()).names[-2:] == ("reward/slow", "reward/quick")


def test_a_chain_runs_in_the_calling_thread():
    threads = []
    note = lambda batch: threads.append(threading.current_thread()) or {}  # noqa: E731
    Pipeline(chain(Step("a", fn=note), Step("b", fn=note, heavy=True), Step("c", fn=note))).run(prompts())
    assert threads == [threading.current_thread()] * 3


def test_independent_controllers_run_at_the_same_time():
    meeting = threading.Barrier(3)

    def meet(name: str):
        def run(batch: RolloutBatch) -> dict[str, Any]:
            meeting.wait(20)
            return {name: torch.zeros(batch.batch_size)}

        return run

    actor = Actor()
    flow = Dataflow()
    for name in ("reward/a", "reward/b"):
        flow.connect(actor.output, Step(name, ("responses",), (name,), meet(name)).input)
    flow.connect(actor.output, Step("values", (), ("rewards",), meet("rewards"), heavy=True).input)
    Pipeline(flow).run(prompts())


def test_heavy_controllers_take_turns_on_one_device_and_overlap_on_two():
    inside = 0
    most = 0
    lock = threading.Lock()

    def alone(batch: RolloutBatch) -> dict[str, Any]:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        threading.Event().wait(0.02)
        with lock:
            inside -= 1
        return {}

    Pipeline(Dataflow().add(*(Step(f"heavy{i}", fn=alone, heavy=True) for i in range(4)))).run(prompts())
    assert most == 1

    meeting = threading.Barrier(2)

    def meet(batch: RolloutBatch) -> dict[str, Any]:
        meeting.wait(20)
        return {}

    pair = [Step(f"heavy{i}", fn=meet, heavy=True) for i in range(2)]
    for index, controller in enumerate(pair):
        controller.device_map = DeviceMap(devices=f"cuda:{index}")
    Pipeline(Dataflow().add(*pair)).run(prompts())


def test_what_follows_a_short_branch_does_not_wait_for_the_long_one():
    follower_ran = threading.Event()
    actor = Actor()
    long = Step("long", ("responses",), ("rewards",), heavy=True)
    long.fn = lambda batch: follower_ran.wait(20) and {"rewards": torch.zeros(batch.batch_size)}
    short = length_reward(streams=False)
    follower = Step("follower", ("reward/length",), (), lambda batch: follower_ran.set() or {})
    flow = Dataflow().connect(actor.output, long.input).connect(actor.output, short.input)
    Pipeline(flow.connect(short.output, follower.input)).run(prompts())
    assert follower_ran.is_set()


def test_a_diamond_joins_both_branches():
    actor, left, right = Actor(), length_reward("left"), length_reward("right")
    total = lambda batch: {"rewards": batch["reward/left"] + batch["reward/right"]}  # noqa: E731
    mixer = Step("mixer", ("reward/left", "reward/right"), ("rewards",), total)
    flow = Dataflow().connect(left.output, mixer.input).connect(right.output, mixer.input)
    flow.connect(actor.output, right.input).connect(actor.output, left.input)
    assert Pipeline(flow).run(prompts()).rewards.tolist() == [2, 4, 6, 8]


def test_every_controller_runs_without_gradients_whatever_the_thread():
    seen = []
    note = lambda batch: seen.append(torch.is_grad_enabled()) or {}  # noqa: E731
    Pipeline(Dataflow().add(*(Step(f"s{i}", fn=note) for i in range(3)))).run(prompts())
    assert seen == [False] * 3
    assert torch.is_grad_enabled()


def test_one_span_per_controller_and_call():
    spans = Spans()
    actor = StreamingActor([[0], [1]])
    Pipeline(chain(actor, length_reward()), spans).run(prompts(3))
    assert spans.names[0] == "actor"
    assert spans.names.count("actor") == 1
    assert 1 <= spans.names.count("length") <= 3


def test_a_pipeline_can_be_sent_to_another_process_after_a_run_and_keeps_its_own_graph():
    flow = chain(Actor(), length_reward())
    pipeline = Pipeline(flow)
    flow.connect(flow["actor"].output, Step("late", ("nothing",)).input)
    before = pipeline.run(prompts())["reward/length"].tolist()
    assert cloudpickle.loads(cloudpickle.dumps(pipeline)).run(prompts())["reward/length"].tolist() == before


# What goes wrong, and who is named


def test_an_invalid_or_incomplete_dataflow_is_refused_before_running():
    with pytest.raises(DataflowError, match="'mean' reads 'rewards', but no controller writes it"):
        Pipeline(chain(Actor(), Step("mean", ("rewards",))))


def test_an_error_of_rlkit_keeps_its_class_and_gets_the_name():
    def bad(batch: RolloutBatch) -> None:
        raise RewardError("sample 2: None is no number")

    with pytest.raises(RewardError, match="controller 'strict' failed: sample 2: None is no number") as caught:
        Pipeline(chain(Actor(), Step("strict", ("responses",), ("rewards",), bad))).run(prompts())
    assert isinstance(caught.value.__cause__, RewardError)
    assert str(caught.value.__cause__) == "sample 2: None is no number"


def test_any_other_error_becomes_a_stage_error_with_the_original_chained():
    with pytest.raises(StageError, match="controller 'divide' failed: ZeroDivisionError: division by zero") as caught:
        Pipeline(chain(Step("divide", fn=lambda batch: 1 / 0))).run(prompts())
    assert isinstance(caught.value, RlkitError)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.__cause__.__traceback__ is not None


def test_an_error_class_that_takes_other_arguments_still_names_the_controller():
    class PickyError(RewardError):
        def __init__(self, code: int, *, detail: str) -> None:
            super().__init__(f"{code} {detail}")

    def bad(batch: RolloutBatch) -> None:
        raise PickyError(7, detail="odd")

    with pytest.raises(StageError, match="controller 'picky' failed: PickyError: 7 odd"):
        Pipeline(chain(Step("picky", fn=bad))).run(prompts())


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (None, DataflowError, "run returned NoneType; expected a dict with the fields score"),
        ({}, DataflowError, "run did not return 'score', which its writes declare"),
        ({"score": [0.0] * 4, "extra": 1}, DataflowError, "run returned 'extra', which its writes do not declare"),
        ({"score": [0.0] * 3}, DataError, "field 'score' needs shape"),
        ({"score": torch.zeros(4, dtype=torch.float64)}, DataError, "'score' has dtype float32, given float64"),
    ],
)
def test_what_a_controller_returns_is_checked(returned, error, message):
    with pytest.raises(error, match=f"controller 'scorer' failed: .*{message}"):
        Pipeline(chain(Actor(), Step("scorer", (), (SCORE,), lambda batch: returned))).run(prompts())


def test_an_undeclared_read_fails_every_time_whatever_has_already_been_written():
    actor = Actor()
    peeker = Step("peeker", ("responses",), (), lambda batch: batch["response_mask"])
    with pytest.raises(DataError, match="'peeker' failed: the batch has no field 'response_mask'"):
        Pipeline(chain(actor, peeker)).run(prompts())


def test_a_batch_that_lacks_a_source_or_already_holds_a_written_field_is_refused():
    pipeline = Pipeline(chain(Actor(), Step("judge", ("columns",), (SCORE,), ones("score"))))
    with pytest.raises(DataflowError, match="controller 'judge' reads 'columns', which the batch lacks"):
        pipeline.run(RolloutBatch({name: prompts()[name] for name in ("input_ids", "attention_mask", "prompts")}))
    with pytest.raises(DataflowError, match="already holds 'score', which controller 'judge' writes"):
        pipeline.run(prompts().with_fields({"score": [0.0] * 4}, [SCORE]))


def test_a_failing_branch_is_reported_once_the_others_have_ended_and_nothing_new_starts():
    started = []
    other_runs = threading.Event()

    def fail(batch: RolloutBatch) -> None:
        assert other_runs.wait(20)
        raise RewardError("no")

    def other(batch: RolloutBatch) -> dict[str, Any]:
        other_runs.set()
        return {"rewards": torch.zeros(batch.batch_size)}

    actor = Actor()
    failing = Step("failing", (), ("reward/a",), fail)
    follower = Step("follower", ("reward/a",), fn=lambda batch: started.append("follower") or {})
    flow = Dataflow().connect(actor.output, failing.input).connect(failing.output, follower.input)
    flow.connect(actor.output, Step("other", (), ("rewards",), other).input)
    pipeline = Pipeline(flow)
    with pytest.raises(RewardError, match="'failing' failed: no"):
        pipeline.run(prompts())
    assert started == []


# Letting go of memory


@pytest.mark.parametrize("where", ["caller", "thread", "stream"])
def test_a_kept_exception_keeps_no_batch_alive(where):
    alive: list[weakref.ref[Any]] = []

    def fail(batch: RolloutBatch) -> dict[str, Any]:
        large = torch.zeros(1000)
        alive.extend([weakref.ref(large), weakref.ref(batch), weakref.ref(batch["input_ids"])])
        raise RewardError(f"no {large.sum()}")

    failing = Step("failing", ("responses",), (SCORE,), fail, streams=where == "stream")
    actor = StreamingActor([[0], [1], [2, 3]])
    flow = chain(actor, failing)
    if where == "thread":
        flow.connect(actor.output, Step("beside", heavy=True).input)
    pipeline = Pipeline(flow)

    def step() -> None:
        start = prompts()
        alive.append(weakref.ref(start))
        try:
            pipeline.run(start)
        finally:
            del start

    with pytest.raises(RewardError) as caught:
        step()
    kept = caught.value
    gc.collect()
    assert len(alive) == 4
    assert [ref() for ref in alive] == [None] * 4
    assert kept.__traceback__ is not None
