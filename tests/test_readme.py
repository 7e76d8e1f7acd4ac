"""The README's tree names every file of the library, and no other; its commands exist."""

import re

from rlkit.cli.main import app
from tests.source_tree import ROOT, modules

README = (ROOT / "README.md").read_text()


def tree() -> set[str]:
    """Paths in the tree, relative to the root."""
    (block,) = re.findall(r"## What is where\n\n```\n(.*?)```", README, re.DOTALL)
    found, stack = set(), list[str]()
    for line in block.splitlines():
        name, _, comment = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        assert comment.strip() or name == "src/", f"{name} has no comment"
        stack[depth:] = [name.rstrip("/")]
        found.add("/".join(stack))
    return found


def test_the_tree_names_every_file() -> None:
    sources = [*modules().values(), *ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("benchmarks/*.py")]
    sources += [file for file in ROOT.glob("widgets/js/src/*.ts") if not file.name.endswith(".d.ts")]
    files = {file.relative_to(ROOT).as_posix() for file in sources if file.name != "__init__.py"}
    assert files - tree() == set()


def test_the_tree_names_nothing_that_is_not_there() -> None:
    assert [path for path in sorted(tree()) if not (ROOT / path).exists()] == []


def test_the_commands_exist() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    named = set(re.findall(r"^rlkit (\w+)", README, re.MULTILINE)) | {"pause", "resume", "step", "checkpoint", "stop"}
    assert named <= known
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", README)) <= targets | {"calls"}
