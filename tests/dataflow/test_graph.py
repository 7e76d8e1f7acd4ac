"""The graph: building it, its order, and what its errors say."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit import Dataflow, DataflowError, DeviceMap, Field
from rlkit.dataflow import Edge
from tests.dataflow.fakes import Actor, Step, chain, length_reward

CRITIC_READS = ("generated_ids", "response_mask")


def critic(**options):
    options = {"role": "critic", "learns_from": ("returns",), "heavy": True, **options}
    return Step("critic", CRITIC_READS, ("values",), **options)


def estimator(*reads):
    return Step("advantage", ("values", *reads), ("advantages", "returns"), role="advantage")


def names(stages):
    return [[controller.name for controller in stage] for stage in stages]


def refused(flow, message, **options):
    with pytest.raises(DataflowError, match=message):
        flow.validate(**options)


# Building


def test_the_loop_of_the_documents_is_valid_in_any_order_of_its_connections():
    actor, reward, value = Actor(), length_reward("reward", learns_from=("rewards",)), critic()
    connections = [
        (actor.output, reward.input, None),
        (reward.output, value.input, None),
        (value.output, actor.feedback, None),
        (value.output, reward.feedback, 0.1),
    ]
    for order in itertools.permutations(connections):
        flow = Dataflow()
        for source, target, weight in order:
            assert flow.connect(source, target, weight=weight) is flow
        flow.validate()
        assert names(flow.stages()) == [["actor"], ["reward"], ["critic"]]


def test_connecting_again_keeps_one_edge_with_the_latest_weight():
    actor, reward = Actor(), length_reward(learns_from=("rewards",))
    flow = Dataflow().connect(actor.output, reward.input).connect(actor.output, reward.input)
    flow.connect(actor.output, reward.feedback, weight=0.1).connect(actor.output, reward.feedback, weight=0.5)
    assert flow.edges == (Edge(actor, reward, "input"), Edge(actor, reward, "feedback", 0.5))
    assert str(flow.edges[1]) == "actor.output -> length.feedback"


def test_a_copy_is_extended_without_touching_the_original():
    actor, reward = Actor(), length_reward()
    flow = Dataflow().connect(actor.output, reward.input)
    mixer = Step("mixer", ("reward/length",), ("rewards",))
    extended = flow.copy().connect(reward.output, mixer.input).add(critic())
    assert names([extended.controllers]) == [["actor", "length", "mixer", "critic"]]
    assert (len(flow), len(flow.edges), mixer in flow, mixer in extended) == (2, 1, False, True)
    assert list(flow) == [actor, reward]


def test_what_a_trainer_asks_of_a_users_graph():
    actor, first, second, value = Actor(), length_reward("a"), length_reward("b"), critic()
    flow = chain(actor, first, value).connect(actor.output, second.input).connect(value.output, actor.feedback)
    assert flow["b"] is second
    assert flow.by_role("reward") == (first, second)
    assert flow.writers_of("reward/a") == (first,)
    assert flow.readers_of("responses") == (first, second)
    assert flow.feeding(value) == (first,)
    assert flow.upstream(value) == (actor, first)
    assert flow.feedback_into(actor) == (Edge(value, actor, "feedback"),)
    with pytest.raises(DataflowError, match="no controller is named 'c'; there are 'actor', 'a', 'critic', 'b'"):
        flow["c"]


@pytest.mark.parametrize(
    ("connect", "message"),
    [
        (
            lambda f, a, r: f.connect(a.input, r.input),
            r"the first port must be an output, actor.input is of kind 'input'",
        ),
        (lambda f, a, r: f.connect(a.feedback, r.input), r"first port must be an output.* write connect\(actor.output"),
        (
            lambda f, a, r: f.connect(a.output, r.output),
            r"length.output is an output; write connect\(..., length.input",
        ),
        (lambda f, a, r: f.connect(a, r), "given the controller 'actor' as its first port; write actor.output"),
        (
            lambda f, a, r: f.connect(a.output, r),
            "given the controller 'length' as its second port; write length.input",
        ),
        (lambda f, a, r: f.connect("actor", r.input), "given 'actor' as its first port; expected a port such as"),
        (lambda f, a, r: f.connect(a.output, r.input, 0.5), "a weight is a share of feedback; leave it out"),
        (lambda f, a, r: f.connect(a.output, r.feedback, -1), "weight=-1.*finite number that is not negative"),
        (lambda f, a, r: f.connect(a.output, r.feedback, float("nan")), "weight=nan.*finite number"),
        (lambda f, a, r: f.connect(a.output, r.feedback, float("inf")), "weight=inf.*finite number"),
        (lambda f, a, r: f.connect(a.output, r.feedback, True), "weight=True.*finite number"),
        (lambda f, a, r: f.connect(a.output, r.feedback, "0.1"), "weight='0.1'.*finite number"),
        (lambda f, a, r: f.add("actor"), r"add\('actor'\): expected a Controller, given str"),
    ],
)
def test_connections_that_cannot_be_are_refused_at_once(connect, message):
    flow = Dataflow()
    with pytest.raises(DataflowError, match=message):
        connect(flow, Actor(), length_reward())
    assert (len(flow), flow.edges) == (0, ())


# Order


def test_stages_are_the_longest_way_from_the_start():
    actor, short, long, late = Actor(), length_reward("short"), length_reward("long"), Step("late")
    flow = chain(actor, long, late).connect(actor.output, short.input).connect(actor.output, late.input)
    assert names(flow.stages()) == [["actor"], ["long", "short"], ["late"]]


def test_feedback_never_orders():
    actor, reward = Actor(), length_reward()
    flow = Dataflow().connect(reward.output, actor.feedback).connect(actor.output, reward.input)
    assert names(flow.stages()) == [["actor"], ["length"]]
    flow.connect(actor.output, actor.feedback)
    assert names(flow.stages()) == [["actor"], ["length"]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_stage_comes_after_all_that_feeds_it_and_no_later_than_needed(data):
    size = data.draw(st.integers(1, 8))
    steps = [Step(f"s{i}") for i in range(size)]
    pairs = [(i, j) for i in range(size) for j in range(i + 1, size)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    flow = Dataflow().add(*data.draw(st.permutations(steps)))
    for i, j in data.draw(st.permutations(chosen)):
        flow.connect(steps[i].output, steps[j].input)
    level = {c: number for number, stage in enumerate(flow.stages()) for c in stage}
    assert len(level) == size
    for step in steps:
        assert level[step] == max((level[other] + 1 for other in flow.feeding(step)), default=0)


# What is refused, and what the message says to do


def test_an_empty_dataflow():
    refused(Dataflow(), r"the dataflow is empty; connect\(actor.output, reward.input\)")


def test_two_controllers_of_one_name():
    actor, one, other = Actor(), length_reward("score"), length_reward("score")
    flow = chain(actor, one).connect(actor.output, other.input)
    refused(
        flow, r"two controllers are named 'score' \(Step and Step\); give one of them name=.*build the Dataflow anew"
    )


def test_a_cycle_names_everybody_in_it_and_the_way_out():
    flow = chain(Step("a"), Step("b"), Step("c"))
    flow.connect(flow["c"].output, flow["b"].input)
    message = r"input edges form a cycle.*: b -> c -> b; close the loop .* connect\(c.output, b.feedback\)"
    refused(flow, message)
    with pytest.raises(DataflowError, match="b -> c -> b"):
        flow.stages()


def test_a_controller_that_feeds_itself_is_a_cycle():
    step = Step("a")
    refused(Dataflow().connect(step.output, step.input), r"a -> a; .* connect\(a.output, a.feedback\)")


def test_an_unknown_field_gets_the_nearest_name_and_how_to_declare_it():
    flow = chain(Actor(), Step("short", ("responces",), ("rewards",)))
    refused(flow, "controller 'short' reads the unknown field 'responces'; did you mean 'responses'?")
    flow = chain(Actor(), Step("short", ("responses",), ("zzz",)))
    refused(flow, r"controller 'short' writes the unknown field 'zzz'; declare what it holds: Field\('zzz'")
    flow = chain(Actor(), Step("short", learns_from=("qqq",)))
    refused(flow, "controller 'short' learns from the unknown field 'qqq'")


def test_a_field_declared_by_its_writer_can_be_read_by_name():
    own = Field("toxicity", ("B",), "float32", "0 to 1")
    writer, reader = Step("judge", ("responses",), (own,)), Step("gate", ("toxicity",), ("rewards",))
    chain(Actor(), writer, reader).validate()
    typo = Step("gate", ("toxicty",), ("rewards",))
    refused(chain(Actor(), writer, typo), "reads the unknown field 'toxicty'; did you mean 'toxicity'?")


def test_writer_and_reader_of_different_shape_or_dtype():
    writer = Step("judge", ("responses",), (Field("score", ("B",), "float32", "one a row"),))
    reader = Step("gate", (Field("score", ("B", "T"), "float32", "one a token"),), ("rewards",))
    message = (
        r"'score': controller 'gate' reads it as \(B, T\) float32, but controller 'judge' writes it as \(B\) float32"
    )
    refused(chain(Actor(), writer, reader), message)
    reader.reads = (Field("score", ("B",), "int64", "whole numbers"),)
    refused(
        chain(Actor(), writer, reader), r"reads it as \(B\) int64, but controller 'judge' writes it as \(B\) float32"
    )


def test_a_field_of_rlkit_cannot_be_declared_differently():
    wrong = Step("critic", ("responses",), (Field("values", ("B",), "float32", "one a row"),))
    refused(chain(Actor(), wrong), r"field 'values': controller 'critic' writes it as \(B\) float32, but rlkit itself")


def test_two_writers_of_one_field():
    actor = Actor()
    one, other = Step("one", ("responses",), ("rewards",)), Step("two", ("responses",), ("rewards",))
    flow = chain(actor, one).connect(actor.output, other.input)
    refused(flow, "field 'rewards' has two writers: controllers 'one' and 'two'; a field has one writer")
    refused(chain(actor, Step("twice", (), ("rewards", "rewards"))), "'rewards' has two writers: 'twice' twice")


def test_writing_what_the_batch_starts_with():
    refused(
        chain(Actor(), Step("cut", (), ("input_ids",))), "'cut' writes the field 'input_ids', which the batch of pro"
    )


def test_a_field_nobody_writes():
    note = Field("note", ("B",), "text", "a remark")
    flow = chain(Actor(), Step("reader", (note,), ("rewards",)))
    refused(flow, "controller 'reader' reads 'note', but no controller writes it and the batch does not start with it")
    flow.validate(sources=("input_ids", "attention_mask", "note"))


def test_a_field_written_elsewhere_gets_the_missing_edge_in_the_message():
    actor, value = Actor(), critic()
    flow = chain(actor, length_reward()).add(value)
    message = (
        r"'critic' reads 'generated_ids', but 'actor', which writes it, does not lead there: add connect\(actor.outp"
    )
    refused(flow, message)
    flow.connect(flow["length"].output, value.input).validate()


def test_a_controller_cannot_read_what_it_writes():
    refused(chain(Actor(), Step("odd", ("rewards",), ("rewards",))), "'odd' reads 'rewards', but only writes it itself")


def test_what_a_trainer_adds_may_be_missing_until_the_graph_is_complete():
    reader = Step("report", ("rewards",))
    flow = chain(Actor(), length_reward(), reader)
    flow.validate()
    message = (
        "controller 'report' reads 'rewards', but no controller writes it and the batch does not start with it; add a "
        "controller that writes 'rewards' and connect its output to report.input"
    )
    refused(flow, message, complete=True)
    mixer = Step("mixer", ("reward/length",), ("rewards",))
    flow.connect(flow["length"].output, mixer.input).connect(mixer.output, reader.input).validate(complete=True)


def test_feedback_into_a_controller_that_cannot_learn():
    reward, value = length_reward(), critic()
    flow = chain(Actor(), reward, value).connect(value.output, reward.feedback, weight=0.1)
    message = r"feedback from 'critic' leads into 'length' \(Step\), which cannot learn: its learns_from is empty; take"
    refused(flow, message)


def test_feedback_without_its_fields_is_found_once_the_graph_is_complete():
    actor, value = Actor(), critic()
    flow = chain(actor, value).connect(value.output, actor.feedback)
    flow.validate()
    message = (
        "controller 'actor' learns from 'advantages' and gets feedback from 'critic', but no controller writes it and "
        "the batch does not start with it; add a controller that writes 'advantages' and connect its output to "
        "actor.feedback"
    )
    refused(flow, message, complete=True)
    advantage = estimator()
    flow.connect(value.output, advantage.input)
    message = (
        r"from 'critic', but 'advantage', which writes it, does not lead there: add connect\(advantage.output, actor.fe"
    )
    refused(flow, message, complete=True)
    flow.connect(advantage.output, actor.feedback).validate(complete=True)


def test_feedback_may_come_from_anything_behind_the_writer():
    actor, value, advantage, after = Actor(), critic(), estimator(), Step("after")
    flow = chain(actor, value, advantage, after).connect(after.output, actor.feedback)
    flow.connect(after.output, value.feedback).validate(complete=True)


def test_a_declaration_that_is_one_string_is_refused_by_name():
    step = Step("short")
    step.reads = "responses"
    refused(chain(Actor(), step), r"controller 'short': reads = 'responses' is one string; write a tuple")


# As plain values


def test_the_graph_as_json():
    actor, reward, value = Actor(), length_reward("reward", learns_from=("rewards",)), critic()
    value.device_map = actor.device_map = DeviceMap(devices="cuda:1")
    flow = chain(actor, reward, value).connect(value.output, reward.feedback, weight=0.1)
    graph = json.loads(json.dumps(flow.to_json()))
    assert [(n["name"], n["role"], n["stage"], n["device"]) for n in graph["nodes"]] == [
        ("actor", "actor", 0, "cuda:1"),
        ("reward", "reward", 1, None),
        ("critic", "critic", 2, "cuda:1"),
    ]
    assert graph["nodes"][1] == {
        "name": "reward",
        "role": "reward",
        "type": "Step",
        "reads": ["prompts", "responses"],
        "writes": ["reward/reward"],
        "learns_from": ["rewards"],
        "device": None,
        "heavy": False,
        "streams": True,
        "stage": 1,
    }
    assert graph["edges"] == [
        {"from": "actor", "to": "reward", "kind": "input", "fields": ["responses"], "weight": None},
        {"from": "reward", "to": "critic", "kind": "input", "fields": list(CRITIC_READS), "weight": None},
        {"from": "critic", "to": "reward", "kind": "feedback", "fields": [], "weight": 0.1},
    ]


def test_an_edge_carries_what_its_target_needs_from_its_source_or_from_before_it():
    actor, value, advantage = Actor(), critic(), estimator("response_mask")
    flow = chain(actor, value, advantage).connect(actor.output, advantage.input)
    flow.connect(advantage.output, actor.feedback).connect(advantage.output, value.feedback)
    fields = {str(edge): flow.edge_fields(edge) for edge in flow.edges}
    assert fields == {
        "actor.output -> critic.input": CRITIC_READS,
        "critic.output -> advantage.input": ("values",),
        "actor.output -> advantage.input": ("response_mask",),
        "advantage.output -> actor.feedback": ("advantages",),
        "advantage.output -> critic.feedback": ("returns",),
    }
