"""What a curriculum refuses when it is declared, and how it describes and shows itself."""

import json
import math
import pickle
from typing import Any

import pytest

from rlkit.curriculum import Curriculum, CurriculumSource, Ramp, Reaches, Stage, Steps
from rlkit.errors import ConfigError, DataError
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
POOLS = {"easy": [f"good w{i}" for i in range(5)], "hard": [f"bad w{i}" for i in range(7)]}
TWO = [Stage("first", {"easy": 1.0}, until=Steps(3)), Stage("both", {"easy": 1, "hard": 3})]


def _open(stages: Any = TWO, pools: Any = POOLS, seed: int = 0) -> CurriculumSource:
    return Curriculum(pools, stages).open(TOKENIZER, seed, 16)


def _declare(**changes: Any) -> Curriculum:
    return Curriculum(**{"pools": POOLS, "stages": TWO, **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _declare(pools={}), "at least one pool of prompts, given none"),
        (lambda: _declare(pools={"easy": [], "hard": ["w1"]}), "pool 'easy' is empty"),
        (lambda: _declare(pools={"a/b": ["w1"]}), "a pool needs a name without '/', given 'a/b'"),
        (lambda: _declare(stages=[]), "at least one stage, given none"),
        (lambda: _declare(stages=["first"]), r"stages must be Stage\(.*given 'first'"),
        (lambda: _declare(stages=[TWO[0], Stage("first", {"easy": 1})]), r"names must differ, given \['first'\]"),
        (lambda: _declare(stages=[Stage("a", {"esay": 1})]), "pool in stage 'a': key 'esay'; did you mean 'easy'"),
        (lambda: _declare(stages=[Stage("a", {})]), "stage 'a' has no pool with a positive weight;"),
        (lambda: _declare(stages=[Stage("a", {"easy": 0})]), "stage 'a' has no pool with a positive weight;"),
        (
            lambda: _declare(stages=[Stage("a", {"easy": Ramp(1, 0, 5), "hard": Ramp(0, 0, 9)})]),
            "no pool with a positive weight after 5 steps",
        ),
        (lambda: _declare(stages=[TWO[1], TWO[1]]), "names must differ"),
        (lambda: _declare(stages=[TWO[1], Stage("z", {"easy": 1})]), "stage 'both' never ends, and others follow"),
        (lambda: _declare(stages=[TWO[0]]), "stage 'first' is the last one and has nothing to go on to"),
        (lambda: _declare(stages=[Stage("a", {"easy": 1e308, "hard": 1e308})]), "stage 'a' are too large to add up"),
        (lambda: _declare(pass_decay=1.0), "pass_decay must lie between 0 and 1"),
        (lambda: _declare(pass_at="1"), "pass_at must be a finite number, given '1'"),
        (lambda: _declare(pass_floor=0.0), "pass_floor must be above 0"),
        (lambda: Stage("", {"easy": 1}), "a stage needs a name"),
        (lambda: Stage("a", "by_passrate"), "mixture='by_passrate' is neither weights nor 'by_pass_rate'"),
        (lambda: Stage("a", ["easy"]), r"mixture must be {pool: weight} or 'by_pass_rate', given \['easy'\]"),
        (lambda: Stage("a", {"easy": -1}), "stage 'a': weight of pool 'easy' must be 0 or more, given -1"),
        (lambda: Stage("a", {"easy": math.nan}), "weight of pool 'easy' must be a finite number, given nan"),
        (lambda: Stage("a", {"easy": True}), "weight of pool 'easy' must be a finite number, given True"),
        (lambda: Stage("a", {"easy": 1}, until=20), "until must be Steps.*given 20"),
        (lambda: Ramp(0, 1, 0), "steps of a ramp must be a whole number of at least 1, given 0"),
        (lambda: Ramp(-1, 1, 5), "start of a ramp must be 0 or more"),
        (lambda: Steps(0), "steps of a stage must be a whole number of at least 1, given 0"),
        (lambda: Steps(2.5), "given 2.5"),
        (lambda: Reaches("", 1), "needs the name of a metric"),
        (lambda: Reaches("a", 0.5, falls_back_below=0.6), "falls_back_below=0.6 is above value=0.5"),
        (lambda: Reaches("a", math.inf), "value of Reaches must be a finite number"),
        (lambda: Reaches("a", 1, for_steps=0), "for_steps of Reaches must be a whole number"),
        (lambda: Reaches("a", 1, smoothing=1.0), "smoothing of Reaches must be at least 0 and below 1, given 1.0"),
        (lambda: _open(seed=-1), "the seed of a curriculum must be 0 or more, given -1"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_declared(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_bad_pool_is_named() -> None:
    with pytest.raises(DataError, match="pool 'hard': prompt 1 is empty"):
        _open(pools={**POOLS, "hard": ["w1", " "]})
    with pytest.raises(DataError, match="pool 'easy' has a column 'pool', which is the name of the pool itself"):
        _open(pools={**POOLS, "easy": [{"prompt": "w1", "pool": 3}]})


def test_the_declaration_is_described_as_json(tmp_path: Any) -> None:
    path = tmp_path / "hard.jsonl"
    path.write_text('"bad w1"\n"bad w2"\n')

    def brevity(response: str) -> float:
        return -len(response)

    stages = [
        Stage("a", {"easy": Ramp(1, 0, 5), "hard": 2}, until=Reaches(None, 0.8, 3, 0.5), rewards=[(brevity, 0.5)]),
        Stage("b", "by_pass_rate", rewards={"brevity": brevity}),
    ]
    curriculum = Curriculum({"easy": POOLS["easy"], "hard": str(path)}, stages, measure="reward/brevity")
    expected = {
        "pools": {"easy": 5, "hard": None},
        "stages": [
            {
                "name": "a",
                "mixture": {"easy": {"start": 1.0, "end": 0.0, "steps": 5}, "hard": 2.0},
                "until": {
                    "metric": "reward/brevity",
                    "value": 0.8,
                    "for_steps": 3,
                    "falls_back_below": 0.5,
                    "smoothing": 0.0,
                },
                "rewards": [["brevity", 0.5]],
            },
            {"name": "b", "mixture": "by_pass_rate", "until": None, "rewards": ["brevity"]},
        ],
        "pass_at": 1.0,
        "measure": "reward/brevity",
        "pass_decay": 0.99,
        "pass_floor": 0.05,
    }
    assert curriculum.describe() == expected == json.loads(json.dumps(expected))
    source = curriculum.open(TOKENIZER, 0, 16)
    assert source.describe() == {**expected, "pools": {"easy": 5, "hard": 2}}
    assert source.stage_rewards == [(brevity, 0.5)]
    assert repr(curriculum) == "Curriculum(pools: easy, hard; stages: a → b)"


def test_it_shows_where_it_stands() -> None:
    source = _open(
        [Stage("<one>", {"easy": 1}, until=Reaches("m", 0.8, 3, 0.5)), Stage("two", {"hard": Ramp(1, 2, 9)})]
    )
    source.observe(1, {"m": 0.0}, [0], [1.0])
    assert repr(source) == "CurriculumSource(stage '<one>' (1 of 2), 1 steps in it; easy 100%, hard 0%)"
    page = source._repr_html_()
    assert "<td><b>▶ &lt;one&gt;</b></td><td>easy 1</td><td>m ≥ 0.8 for 3 steps, back below 0.5</td>" in page
    assert "<td>two</td><td>hard 1 → 2 in 9 steps</td><td>goes on</td>" in page
    assert "<td>easy</td><td>100%</td><td>100%</td>" in page
    assert "<td>hard</td><td>0%</td><td>–</td>" in page
    assert "▶" not in Curriculum(POOLS, TWO)._repr_html_()


def test_it_travels_to_another_process() -> None:
    source = _open(TWO[1:])
    source.next(5)
    copy = pickle.loads(pickle.dumps(source))
    assert [row.index for row in copy.next(20)] == [row.index for row in source.next(20)]
