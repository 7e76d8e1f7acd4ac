"""Rows that are read before their producer is done: earlier, and with the same results."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit import ActorController, DataError, DataflowError, DeviceMap, RewardController, RewardError
from rlkit.batch import DataCollector, Field, RolloutBatch
from rlkit.controllers.base import Controller
from rlkit.dataflow import Dataflow
from rlkit.pipeline import Pipeline
from tests.dataflow.fakes import Actor, Step, StreamingActor, answers, chain, length_reward, prompts
from tests.tiny import tiny_model, tiny_tokenizer

MARKS = Field("marks", ("B", "T"), "float32", "1000 x first prompt id + position, on sampled tokens")
FULL = Field("full", ("B", "L"), "int64", "the ids plus one, on real tokens")
NOTE = Field("note", ("B",), "text", "the response, bracketed")
FLAG = Field("flag", ("B", "T"), "bool", "true on even positions of sampled tokens")
SHARE = Field("share", ("B", "K"), "float32", "K = 2 numbers a row")
WRITTEN = (MARKS, FULL, NOTE, FLAG, SHARE)


def describe(batch: RolloutBatch) -> dict[str, Any]:
    """Row-wise results of every kind, padded with zeros where no token was sampled."""
    mask = batch["response_mask"]
    position = torch.arange(mask.shape[1])[None]
    return {
        "marks": (1000.0 * batch["input_ids"][:, :1] + position) * mask,
        "full": (batch["generated_ids"] + 1) * batch.full_attention_mask,
        "note": [f"[{text}]" for text in batch["responses"]],
        "flag": mask & (position % 2 == 0),
        "share": torch.stack([batch["rows"].float(), batch.response_lengths.float()], dim=1),
    }


def describer(**options: Any) -> Step:
    return Step("describe", ("generated_ids", "response_mask", "responses"), WRITTEN, describe, **options)


def values(batch: RolloutBatch) -> dict[str, Any]:
    return {n: batch[n].tolist() if isinstance(batch[n], torch.Tensor) else batch[n] for n in batch.names}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_streamed_results_equal_the_plain_ones_for_any_order_and_grouping_of_rows(data):
    size = data.draw(st.integers(1, 6), label="rows")
    order = data.draw(st.permutations(range(size)), label="order")
    order = order[: data.draw(st.integers(0, size), label="rows emitted before the end")]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(order) - 1, 1))), label="cuts"))
    chunks = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    plain = Pipeline(chain(Actor(), describer())).run(prompts(size))
    streamed = Pipeline(chain(StreamingActor(chunks), describer(streams=True))).run(prompts(size))
    assert values(streamed) == values(plain)
    assert streamed.names == plain.names


def test_a_row_is_scored_while_its_producer_still_works():
    scored = threading.Event()

    def score(batch: RolloutBatch) -> dict[str, Any]:
        scored.set()
        return {"reward/length": [float(len(text)) for text in batch["responses"]]}

    widths = []

    def wait_for_score(rows: Any) -> None:
        widths.append(rows)
        assert scored.wait(20), "the first row was not scored while the actor was running"

    reward = length_reward()
    reward.fn = score
    done = Pipeline(chain(StreamingActor([[1], [0]], wait_for_score), reward)).run(prompts(3))
    assert widths == [[1], [0]]
    assert done["reward/length"].tolist() == [1, 2, 3]


def test_each_row_is_scored_once_on_the_width_that_is_there():
    calls: list[tuple[list[int], int]] = []
    taken = threading.Semaphore(0)

    def score(batch: RolloutBatch) -> dict[str, Any]:
        calls.append((batch["rows"].tolist(), batch.response_width))
        taken.release()
        return {"rewards": batch.response_lengths.float()}

    reader = Step("reader", ("response_mask",), ("rewards",), score, streams=True)
    actor = StreamingActor([[0], [2, 1]], lambda rows: taken.acquire(timeout=20))
    done = Pipeline(chain(actor, reader)).run(prompts(4))
    assert calls == [([0], 1), ([2, 1], 3), ([3], 4)]
    assert done.rewards.tolist() == [1, 2, 3, 4]


def test_a_backlog_is_read_in_one_call():
    calls: list[list[int]] = []
    inside, may_go_on = threading.Event(), threading.Event()

    def score(batch: RolloutBatch) -> dict[str, Any]:
        calls.append(batch["rows"].tolist())
        inside.set()
        assert may_go_on.wait(20)
        return {"rewards": batch.response_lengths.float()}

    def between(rows: Any) -> None:
        assert inside.wait(20)
        if rows == [1]:
            may_go_on.set()
            while len(calls) < 2:
                threading.Event().wait(0.001)

    reader = Step("reader", ("response_mask",), ("rewards",), score, streams=True)
    done = Pipeline(chain(StreamingActor([[2], [0], [1]], between), reader)).run(prompts(4))
    assert calls == [[2], [0, 1], [3]]
    assert done.rewards.tolist() == [1, 2, 3, 4]


def test_several_readers_stream_from_one_producer():
    both = threading.Barrier(3)
    scores = []
    for name in ("a", "b"):
        reward = length_reward(name)
        plain = reward.fn

        def score(batch: RolloutBatch, plain: Any = plain) -> Any:
            if batch.batch_size == 1:
                both.wait(20)
            return plain(batch)

        reward.fn = score
        scores.append(reward)
    actor = StreamingActor([[0]], lambda rows: both.wait(20))
    flow = Dataflow()
    for reward in scores:
        flow.connect(actor.output, reward.input)
    done = Pipeline(flow).run(prompts(3))
    assert done["reward/a"].tolist() == done["reward/b"].tolist() == [1, 2, 3]


def calls_of(flow: Dataflow, reader: Step) -> list[list[int]]:
    """The rows of each call of `reader` in one run."""
    calls: list[list[int]] = []
    plain = reader.fn

    def noted(batch: RolloutBatch) -> Any:
        calls.append(batch["rows"].tolist())
        return plain(batch)

    reader.fn = noted
    Pipeline(flow).run(prompts(3))
    return calls


def test_a_reader_that_also_needs_another_branch_waits_for_it():
    actor, reward = StreamingActor([[0], [1]]), length_reward()
    second = Step("second", ("responses", "reward/length"), ("rewards",), streams=True)
    second.fn = lambda batch: {"rewards": batch["reward/length"]}
    flow = chain(actor, reward, second).connect(actor.output, second.input)
    assert calls_of(flow, second) == [[0, 1, 2]]


def test_a_reader_behind_an_edge_from_another_branch_waits_even_if_it_reads_nothing_there():
    actor, reader = StreamingActor([[0], [1]]), length_reward()
    first = Step("first", ("responses",))
    flow = chain(actor, first, reader).connect(actor.output, reader.input)
    assert calls_of(flow, reader) == [[0, 1, 2]]


def test_what_lies_before_the_producer_can_be_read_too():
    hints = Step("hints", ("prompts",), (Field("hint", ("B",), "float32", "a number"),))
    hints.fn = lambda batch: {"hint": batch["rows"].float() * 100}
    scored = threading.Event()

    def score(batch: RolloutBatch) -> dict[str, Any]:
        scored.set()
        return {"rewards": batch["hint"] + torch.tensor([float(len(text)) for text in batch["responses"]])}

    reader = Step("reader", ("hint", "responses"), ("rewards",), score, streams=True)
    flow = chain(hints, StreamingActor([[2]], lambda rows: scored.wait(20)), reader).connect(hints.output, reader.input)
    assert Pipeline(flow).run(prompts(3)).rewards.tolist() == [1, 102, 203]


def test_rows_emitted_without_a_needed_field_are_read_at_the_end():
    actor, reward = StreamingActor([[0], [1]]), length_reward()
    actor.emitted = ("generated_ids", "response_mask")
    assert calls_of(chain(actor, reward), reward) == [[0, 1, 2]]


def test_a_producer_that_emits_nothing_is_read_whole():
    actor, reward = StreamingActor([]), length_reward()
    assert calls_of(chain(actor, reward), reward) == [[0, 1, 2]]


def test_run_streaming_is_not_asked_for_when_nobody_reads_early():
    actor = StreamingActor([[0]], lambda rows: pytest.fail("run_streaming was called"))
    Pipeline(chain(actor, length_reward(streams=False))).run(prompts(3))


def test_a_heavy_reader_streams_only_from_another_device():
    actor, reader = StreamingActor([[0], [1]]), length_reward(heavy=True)
    assert calls_of(chain(actor, reader), reader) == [[0, 1, 2]]

    scored = threading.Event()
    actor, reader = StreamingActor([[0]], lambda rows: scored.wait(20)), length_reward(heavy=True)
    actor.device_map, reader.device_map = DeviceMap(devices="cuda:0"), DeviceMap(devices="cuda:1")
    plain = reader.fn
    reader.fn = lambda batch: (scored.set(), plain(batch))[1]
    calls = calls_of(chain(actor, reader), reader)
    assert calls == [[0], [1, 2]]


def test_a_sampled_batch_is_scored_the_same_whether_its_rows_stream_or_not():
    tokenizer = tiny_tokenizer()
    actor = ActorController(tiny_model(), tokenizer)
    actor.sampling = replace(actor.sampling, max_new_tokens=12)
    calls: list[int] = []

    def words(responses: list[str]) -> list[float]:
        calls.append(len(responses))
        return [float(len(text.split())) for text in responses]

    reward = RewardController(words)
    texts = ["the film was", "good", "the food was not very good", "a day", "it was so bad", "film and food"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    start = RolloutBatch({**DataCollector(2).collate_prompts(ids), "prompts": texts, "columns": [{}] * 6})
    results = []
    for reward.streams in (False, True):
        actor.rng = torch.Generator().manual_seed(3)
        results.append(values(Pipeline(chain(actor, reward)).run(start)))
    assert results[0] == results[1]
    assert len({len(text.split()) for text in results[0]["responses"]}) > 2, "rows finish at different times"
    assert calls[0] == 6
    assert sum(calls[1:]) == 6
    assert len(calls) > 2


# What goes wrong, and who is named


def test_a_failing_reader_stops_its_producer_through_emit():
    failed = threading.Event()
    stopped = []

    class Endless(Actor):
        def run_streaming(self, batch: RolloutBatch, emit: Any) -> Any:
            emit([0], answers(batch.select([0])))
            assert failed.wait(20)
            while True:
                threading.Event().wait(0.005)
                try:
                    emit([], {})
                except BaseException as error:
                    stopped.append(type(error).__name__)
                    raise

    def fail(batch: RolloutBatch) -> None:
        failed.set()
        raise RewardError("sample 0: no number")

    reward = length_reward("strict")
    reward.fn = fail
    before = threading.active_count()
    with pytest.raises(RewardError, match="controller 'strict' failed: sample 0: no number"):
        Pipeline(chain(Endless(), reward)).run(prompts(3))
    assert stopped == ["Stopped"]
    assert threading.active_count() == before


def test_a_failing_producer_is_named_and_leaves_no_reader_behind():
    def fail(rows: Any) -> None:
        raise RuntimeError("out of paper")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="controller 'actor' failed: RuntimeError: out of paper"):
        Pipeline(chain(StreamingActor([[0]], fail), length_reward())).run(prompts(3))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([[0], [0]], "emitted row 0 twice; emit each row once"),
        ([[3]], "emitted row 3; the batch has rows 0 to 2"),
        ([[-1]], "emitted row -1; the batch has rows 0 to 2"),
    ],
)
def test_rows_that_cannot_be_are_refused(chunks, message):
    class Careless(StreamingActor):
        def run_streaming(self, batch: RolloutBatch, emit: Any) -> Any:
            for rows in self.chunks:
                emit(rows, answers(batch.select([0] * len(rows))))
            return self.run(batch)

    with pytest.raises(DataflowError, match=f"controller 'actor' failed: {message}"):
        Pipeline(chain(Careless(chunks), length_reward())).run(prompts(3))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"luck": [1]}, DataflowError, "'actor' failed: emitted the field 'luck', which is not in its writes"),
        ({"responses": ["a", "b"]}, DataflowError, "'actor' failed: emitted 1 rows, but 2 values of 'responses'"),
        ({"responses": [7]}, DataError, "'length' failed: the rows that 'actor' emitted do not fit: field 'responses'"),
    ],
)
def test_emitted_fields_are_checked(fields, error, message):
    class Careless(Actor):
        def run_streaming(self, batch: RolloutBatch, emit: Any) -> Any:
            emit([0], fields)
            threading.Event().wait(0.2)
            return self.run(batch)

    with pytest.raises(error, match=message):
        Pipeline(chain(Careless(), length_reward())).run(prompts(3))


def test_a_reader_that_returns_the_wrong_number_of_scores_is_named():
    reward = length_reward("short")
    reward.fn = lambda batch: {"reward/short": [0.0] * (batch.batch_size + 1)}
    with pytest.raises(DataError, match="controller 'short' failed: field 'reward/short' needs shape"):
        Pipeline(chain(StreamingActor([[0]]), reward)).run(prompts(3))


def test_streaming_is_optional_for_a_producer():
    assert Actor.run_streaming is Controller.run_streaming
    start = prompts(2)
    assert Actor().run_streaming(start, lambda rows, fields: None)["responses"] == ["x", "xx"]
