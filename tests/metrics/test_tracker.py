"""The tracker: values, tensors, threads, spans."""

import gc
import json
import math
import pickle
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from rlkit.errors import ConfigError, DataError
from rlkit.metrics import METRICS, MetricsTracker, Sum


def test_values_are_pooled_per_name_and_the_next_step_starts_afresh():
    tracker = MetricsTracker()
    tracker.add("train/loss", 1.0, count=3)
    tracker.add("train/loss", 5.0)
    tracker.add_sum_count("train/kl", 6.0, 4)
    first = tracker.flush(7)
    assert first.step == 7
    assert first.metrics == {"train/loss": 2.0, "train/kl": 1.5}
    assert tracker.flush(8).metrics == {}


def test_names_of_the_table_have_their_own_reductions():
    tracker = MetricsTracker()
    tracker.add("memory/process_rss_mb", 10.0)
    tracker.add("memory/process_rss_mb", 30.0)
    tracker.add("memory/elsewhere_mb", 3.0)
    tracker.add("memory/elsewhere_mb", 2.0)
    tracker.add_sum_count("rollout/throughput_tokens_per_sec", 50, 2.0)
    tracker.add_sum_count("rollout/throughput_tokens_per_sec", 70, 2.0)
    metrics = tracker.flush(1).metrics
    assert metrics == {
        "memory/process_rss_mb": 30.0,
        "memory/elsewhere_mb": 3.0,
        "rollout/throughput_tokens_per_sec": 30.0,
    }
    fixed = ("rollout/throughput_tokens_per_sec", "reward/latency_ms", "train/step_time_ms", "memory/actor_gpu_mem_mb")
    assert set(fixed) <= set(METRICS)


def test_a_declared_reduction_wins_and_cannot_change_under_values():
    tracker = MetricsTracker()
    tracker.declare("mine/rows", "sum")
    tracker.add("mine/rows", 2)
    tracker.add("mine/rows", 3)
    with pytest.raises(ConfigError, match="already has values"):
        tracker.declare("mine/rows", "max")
    tracker.declare("mine/rows", Sum)
    assert tracker.flush(1).metrics == {"mine/rows": 5.0}
    with pytest.raises(ConfigError, match="unknown reduction 'median'"):
        tracker.declare("mine/rows", "median")


@pytest.mark.parametrize(
    "value", [True, np.float32(1.0), np.int64(1), np.array(1.0), torch.tensor(1.0), torch.ones(1, 1), torch.tensor(1)]
)
def test_anything_that_is_one_number_is_taken(value: object):
    tracker = MetricsTracker()
    tracker.add("a/b", value)
    assert tracker.flush(1).metrics == {"a/b": 1.0}


@pytest.mark.parametrize("value", ["1.0", torch.ones(2), [1.0], None])
def test_anything_else_is_refused_by_name(value: object):
    with pytest.raises(DataError, match="'a/b'"):
        MetricsTracker().add("a/b", value)


def test_a_tensor_is_read_as_it_was_when_it_was_added():
    tracker = MetricsTracker()
    total = torch.tensor(1.0)
    tracker.add("a/b", total)
    total.add_(100)
    assert tracker.flush(1).metrics == {"a/b": 1.0}


def test_a_thousand_losses_hold_no_graph():
    tracker = MetricsTracker()
    parameter = torch.nn.Parameter(torch.ones(4))
    graphs = []
    for _ in range(1000):
        hidden = parameter * 2
        graphs.append(weakref.ref(hidden))
        loss = hidden.sum()
        tracker.add("train/loss", loss)
        tracker.add_sum_count("train/kl", loss, loss.detach())
    del hidden, loss
    gc.collect()
    assert not any(graph() is not None for graph in graphs)
    assert tracker.flush(1).metrics["train/loss"] == 8.0


def test_nan_reaches_the_metrics():
    tracker = MetricsTracker()
    tracker.add("train/loss", math.nan)
    assert math.isnan(tracker.flush(1).metrics["train/loss"])


def test_no_value_of_any_thread_is_lost_while_another_flushes():
    tracker = MetricsTracker()
    tracker.declare("n/added", "sum")

    def work() -> None:
        for _ in range(5000):
            tracker.add("n/added", 1)
            with tracker.span("work"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    flushed = []
    while any(thread.is_alive() for thread in threads):
        flushed.append(tracker.flush(0))
    flushed.append(tracker.flush(0))
    assert sum(item.metrics.get("n/added", 0) for item in flushed) == 20_000
    assert sum(len(item.spans) for item in flushed) == 20_000


def test_spans_say_when_and_how_long_also_when_the_work_fails():
    tracker = MetricsTracker()
    before = time.time()

    def fail() -> None:
        time.sleep(0.02)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), tracker.span("actor", rank=2):
        fail()
    (span,) = tracker.flush(1).spans
    assert (span.name, span.rank) == ("actor", 2)
    assert before <= span.start <= time.time()
    assert 0.02 <= span.duration_s < 5


def test_ranks_merge_their_states():
    mine, theirs = MetricsTracker(), MetricsTracker()
    mine.add_sum_count("train/loss", 3, 12)
    theirs.add_sum_count("train/loss", torch.tensor(3), 4)
    theirs.add("train/lr", 0.5)
    with theirs.span("actor", rank=1):
        pass
    mine.merge(json.loads(json.dumps(theirs.state())))
    merged = mine.flush(1)
    assert merged.metrics == {"train/loss": 0.375, "train/lr": 0.5}
    assert [span.rank for span in merged.spans] == [1]


def test_a_merge_of_two_reductions_changes_nothing():
    mine, theirs = MetricsTracker(), MetricsTracker()
    theirs.declare("a/b", "max")
    theirs.add("a/b", 9)
    theirs.add("a/a", 9)
    mine.add("a/b", 1)
    with pytest.raises(ConfigError, match="'mean' here and by 'max' there"):
        mine.merge(theirs.state())
    assert mine.flush(1).metrics == {"a/b": 1.0}


def test_an_abandoned_step_leaves_nothing():
    tracker = MetricsTracker()
    tracker.add("train/loss", 1.0)
    tracker.state()
    tracker.add("train/loss", 2.0)
    with tracker.span("actor"):
        pass
    tracker.discard()
    flushed = tracker.flush(1)
    assert (flushed.metrics, flushed.spans) == ({}, [])


def test_declarations_travel_to_another_process_and_values_do_not():
    tracker = MetricsTracker()
    tracker.declare("a/b", "sum")
    tracker.add("a/b", 1)
    copy = pickle.loads(pickle.dumps(tracker))
    copy.add("a/b", 2)
    copy.add("a/b", 3)
    assert copy.flush(1).metrics == {"a/b": 5.0}


def test_adding_costs_microseconds():
    tracker = MetricsTracker()
    began = time.process_time()
    for _ in range(20_000):
        tracker.add("train/loss", 1.0)
    assert (time.process_time() - began) / 20_000 < 50e-6  # about 0.5 µs on an idle core
