"""The drawing: complete, self-contained, without boxes on each other, and legible on light and dark pages."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit import Dataflow
from rlkit.dataflow.layout import lay_out
from rlkit.dataflow.svg import render_svg
from tests.dataflow.fakes import Actor, Step, chain, length_reward

SVG = "{http://www.w3.org/2000/svg}"


def ppo():
    """A graph of every kind of line: fan-out, fan-in, an edge past a column, weighted and unweighted feedback."""
    actor = Actor()
    sentiment = length_reward("sentiment", learns_from=("rewards",))
    critic = Step("critic", ("generated_ids",), ("values",), role="critic", learns_from=("returns",), heavy=True)
    mixer = Step("mixer", ("reward/sentiment", "reward/brevity"), ("rewards",), role="mixer")
    reads = ("rewards", "values", "response_mask")
    advantage = Step("advantage", reads, ("advantages", "returns", "token_rewards"), role="advantage")
    flow = Dataflow()
    for reward in (sentiment, length_reward("brevity")):
        flow.connect(actor.output, reward.input).connect(reward.output, mixer.input)
    flow.connect(actor.output, critic.input).connect(critic.output, advantage.input)
    flow.connect(mixer.output, advantage.input).connect(actor.output, advantage.input)
    flow.connect(advantage.output, actor.feedback).connect(advantage.output, critic.feedback)
    return flow.connect(critic.output, sentiment.feedback, weight=0.1)


def cyclic():
    flow = chain(Step("a", (), ("rewards",)), Step("b", ("rewards",), ("values",)))
    return flow.connect(flow["b"].output, flow["a"].input)


def texts(root):
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def test_a_notebook_gets_the_drawing_and_words():
    bundle = ppo()._repr_mimebundle_()
    assert set(bundle) == {"image/svg+xml", "text/plain"}
    assert ET.fromstring(bundle["image/svg+xml"]).tag == f"{SVG}svg"
    assert bundle["text/plain"].splitlines() == [
        "Dataflow: 6 controllers in 4 stages",
        "  1. actor: generated_ids, response_mask, responses",
        "  2. sentiment (reward): reward/sentiment, brevity (reward): reward/brevity, critic: values",
        "  3. mixer: rewards",
        "  4. advantage: advantages, returns, token_rewards",
        "  feedback advantage -> actor: advantages",
        "  feedback advantage -> critic: returns",
        "  feedback critic -> sentiment (weight 0.1)",
    ]


def test_everything_is_labelled():
    root = ET.fromstring(ppo().to_svg())
    shown = texts(root)
    for name in ("actor", "sentiment", "brevity", "critic", "mixer", "advantage"):
        assert shown.count(name) == 1
    for label in ("reward/sentiment", "reward/brevity", "values", "rewards", "response_mask", "advantages", "returns"):
        assert label in shown
    assert "feedback · weight 0.1" in shown
    assert "reward · streams" in shown
    assert len(root.findall(f".//{SVG}path")) == len(root.findall(f".//{SVG}polygon")) == 11
    dashed = root.findall(f".//{SVG}g[@class='back']")
    assert len(dashed) == 3


def test_fields_are_shortened_on_edges_and_complete_in_tooltips():
    long = "reward/a_very_long_name_of_a_term"
    many = Step("many", ("generated_ids", "response_mask", "responses"), (long,))
    flow = chain(Actor(), many, Step("last", (long,)))
    root = ET.fromstring(flow.to_svg())
    assert {"generated_ids", "+ 2 more", "reward/a_very_long_…"} <= set(texts(root))
    tooltips = ["".join(node.itertext()) for node in root.iter(f"{SVG}title")]
    assert "actor.output -> many.input\ngenerated_ids, response_mask, responses" in tooltips
    assert f"many.output -> last.input\n{long}" in tooltips


def test_nothing_is_fetched_run_or_shared_between_drawings():
    svg = ppo().to_svg()
    assert re.findall(r"https?://[^\"' )]+", svg) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<script|<image|<use|href|url\(|\bid=|\bon\w+=", svg)
    assert ppo().to_svg() == svg


def test_names_cannot_break_out_of_the_drawing():
    svg = chain(Step('<script>"&'), Step("b")).to_svg()
    root = ET.fromstring(svg)
    assert "<script>" not in svg
    assert '<script>"&' in texts(root)


def test_a_graph_that_cannot_run_can_still_be_drawn():
    root = ET.fromstring(cyclic().to_svg())
    assert {"a", "b"} <= set(texts(root))
    assert len(root.findall(f".//{SVG}path")) == 2
    assert texts(ET.fromstring(Dataflow().to_svg())) == ["empty dataflow"]
    assert Dataflow()._repr_mimebundle_()["text/plain"] == "Dataflow: 0 controllers in 0 stages"


def boxes_apart(flow):
    drawing = lay_out(flow.to_json())
    for box in drawing.boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.right <= drawing.width
        assert box.bottom <= drawing.height
    for one, other in itertools.combinations(drawing.boxes, 2):
        beside = one.right <= other.x or other.right <= one.x
        assert beside or one.bottom < other.y or other.bottom < one.y, (one.title, other.title)
    ends = [(round(route.tip[0], 1), round(route.tip[1], 1)) for route in drawing.routes]
    assert len(set(ends)) == len(ends), "two arrows end on one point"
    for route in drawing.routes:
        assert route.tip[1] <= drawing.height
    return drawing


@pytest.mark.parametrize("make", [ppo, cyclic, Dataflow, lambda: Dataflow().add(Actor())])
def test_boxes_and_arrow_tips_are_apart(make):
    boxes_apart(make())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_boxes_and_arrow_tips_are_apart_in_any_graph(data):
    size = data.draw(st.integers(1, 7))
    steps = [Step(f"step {i}", (), (f"reward/{i}",), learns_from=("rewards",)) for i in range(size)]
    for step in steps:
        step.reads = tuple(f"reward/{i}" for i in data.draw(st.sets(st.integers(0, size - 1))))
    flow = Dataflow().add(*steps)
    for i, j in data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=12)):
        flow.connect(steps[i].output, steps[j].input if i < j else steps[j].feedback)
    boxes_apart(flow)
    ET.fromstring(render_svg(flow.to_json()))


def test_an_edge_past_a_column_does_not_run_through_its_boxes():
    drawing = boxes_apart(ppo())
    mixer = next(box for box in drawing.boxes if box.title == "mixer")
    route = next(route for route in drawing.routes if route.tooltip.startswith("critic.output -> advantage.input"))
    x, y, passed = 0.0, 0.0, 0
    for command, numbers in re.findall(r"([MCH])([^MCH]*)", route.path):
        values = [float(number) for number in numbers.split()]
        if command == "H":
            if min(x, values[0]) <= mixer.x and mixer.right <= max(x, values[0]):
                passed += 1
                assert not mixer.y <= y <= mixer.bottom
            x = values[0]
        else:
            x, y = values[-2:]
    assert passed == 1


def luminance(colour):
    colour = colour.lstrip("#")
    colour = "".join(2 * digit for digit in colour) if len(colour) == 3 else colour
    channels = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_and_lines_stand_out_in_both_themes():
    svg = ppo().to_svg()
    themes = [dict(re.findall(r"--(\w+):(#\w+)", block)) for block in re.findall(r"\{(--[^}]*)\}", svg)]
    assert len(themes) == 2
    for theme in themes:
        assert contrast(theme["ink"], theme["paper"]) >= 7
        assert contrast(theme["back"], theme["paper"]) >= 4.5
        assert contrast(theme["line"], theme["paper"]) >= 4.5
    (ink,) = re.findall(r"\.box text\{fill:(#\w+)\}", svg)
    fills = set(re.findall(r'fill="(#\w+)"', svg))
    assert len(fills) == 5
    for fill in fills:
        assert contrast(ink, fill) >= 7
