"""How the trainer in a user's file is found."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest

from rlkit.cli.script import ScriptError, execute, find_trainer
from rlkit.errors import ConfigError, RewardError

Write = Callable[..., Path]

TRAINER = """
class Trainer:
    def __init__(self, tag=""): self.tag = tag
    def start(self, dir, steps=None): ...
    def train(self, steps=None, dir=None): ...
    def step(self): ...
"""


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Writes a script; what running it changes in this process is undone."""
    before = (list(sys.path), list(sys.argv), set(sys.modules))

    def make(source: str, name: str = "my_script.py") -> Path:
        path = tmp_path / name
        path.write_text(TRAINER + textwrap.dedent(source))
        return path

    yield make
    sys.path[:], sys.argv[:] = before[0], before[1]
    for name in set(sys.modules) - before[2]:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_only_trainer_is_taken(write: Write) -> None:
    assert find_trainer(execute(write("anything = Trainer('a')"))).tag == "a"


def test_two_names_of_one_trainer_are_one(write: Write) -> None:
    assert find_trainer(execute(write("a = b = Trainer('a')"))).tag == "a"


def test_of_several_one_must_be_named(write: Write) -> None:
    module = execute(write("small = Trainer('s')\nlarge = Trainer('l')"))
    with pytest.raises(ConfigError, match=r"several trainers \(small, large\); choose one with --trainer NAME"):
        find_trainer(module)
    assert find_trainer(module, "large").tag == "l"


def test_a_function_that_makes_one_is_called(write: Write) -> None:
    module = execute(write("def build_trainer(tag='made'): return Trainer(tag)\ndef helper(): return 3"))
    assert find_trainer(module).tag == "made"


def test_a_function_is_found_by_what_it_says_it_returns(write: Write) -> None:
    assert find_trainer(execute(write("def make() -> Trainer: return Trainer('made')"))).tag == "made"


def test_any_function_can_be_named(write: Write) -> None:
    assert find_trainer(execute(write("def experiment(): return Trainer('x')")), "experiment").tag == "x"


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("x = 1", None, "has no trainer: assign one"),
        ("x = 1", "y", "has no 'y'"),
        ("x = 1", "x", "neither a trainer nor a function without arguments"),
        ("def f(n): return Trainer()", "f", "neither a trainer nor a function without arguments"),
        ("def f(): return 3", "f", r"f\(\) in .* returned int, which is no trainer"),
        ("def a_trainer(): ...\ndef b_trainer(): ...", None, r"several functions .* \(a_trainer, b_trainer\)"),
    ],
)
def test_a_file_without_a_clear_trainer(write: Write, source: str, name: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_trainer(execute(write(source)), name)


def test_the_main_part_does_not_run(write: Write) -> None:
    find_trainer(execute(write("t = Trainer()\nif __name__ == '__main__': raise SystemExit(3)")))


def test_arguments_and_neighbours_are_there_as_with_python(write: Write, tmp_path: Path) -> None:
    (tmp_path / "my_neighbour.py").write_text("TAG = 'from next door'")
    module = execute(write("import sys, my_neighbour\nt = Trainer((my_neighbour.TAG, sys.argv[1:]))"), ["--fast", "3"])
    assert find_trainer(module).tag == ("from next door", ["--fast", "3"])


def test_what_the_file_defines_travels_by_value(write: Write) -> None:
    module = execute(write("def reward(response): return len(response)\nt = Trainer()"))
    pickled = cloudpickle.dumps(module.reward)
    assert pickled != module.reward.__qualname__
    del sys.modules[module.__name__]
    assert cloudpickle.loads(pickled)("four") == 4


def test_an_error_in_the_file_shows_its_own_lines_only(write: Write) -> None:
    with pytest.raises(ScriptError) as caught:
        execute(write("def helper():\n    return 1 / 0\nhelper()"))
    text = str(caught.value)
    assert "ZeroDivisionError" in text
    assert text.count("my_script.py") == 3  # the headline, the call and the line that failed
    assert "rlkit/cli/script.py" not in text
    assert "importlib" not in text


def test_errors_of_rlkit_pass_as_they_are(write: Write) -> None:
    with pytest.raises(RewardError, match=r"^too short$"):
        execute(write("from rlkit.errors import RewardError\nraise RewardError('too short')"))


@pytest.mark.parametrize("name", ["nothing.py", "notes.txt"])
def test_what_is_no_python_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("x = 1")
    with pytest.raises(ConfigError, match="is not a Python file"):
        execute(tmp_path / name)


def test_a_name_that_is_taken_does_not_replace_a_module(write: Write) -> None:
    import json

    module = execute(write("t = Trainer()", name="json.py"))
    assert sys.modules["json"] is json
    assert module.__name__.startswith("rlkit_script_")
