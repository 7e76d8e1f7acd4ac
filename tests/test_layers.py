"""The floors of the house: an import only ever points down. Imports inside functions and for typing count as well."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.source_tree import Import, imports, modules, tree

# From top to bottom. A module may import from its own floor and from those below it.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("trainers",),
    ("pipeline",),
    ("dataflow",),
    ("controllers",),
    ("generation",),
    ("engines",),
    ("reward_lint",),
    ("rewards", "curriculum", "data"),
    ("config", "config_fields", "config_vllm", "presets"),
    ("metrics",),
    ("runs",),
    ("batch", "balance", "fields", "collate", "device_map", "schedules"),
    ("algorithms",),
    ("kernels",),
    ("errors", "env", "utils"),
)
LEVEL = {name: level for level, floor in enumerate(FLOORS) for name in floor}
BOTTOM = FLOORS[-1]

# The command line and the widgets stand outside: they know runs (and what everybody knows) and not each other.
OUTSIDE = ("cli", "rlkit_widgets")
OUTSIDE_KNOW = {"runs", *BOTTOM}

# What rlkit/__init__.py itself holds; importing it is no arrow to anywhere.
ROOT_NAMES = {"rlkit"}


def room(module: str) -> str:
    """The part of the house a module belongs to: `runs` for rlkit.runs.log, `rlkit_widgets` for all of the widgets."""
    parts = module.split(".")
    return parts[0] if parts[0] == "rlkit_widgets" or len(parts) == 1 else parts[1]


def violation(found: Import) -> str | None:
    """Why an import points the wrong way; None when it does not."""
    importer, imported = room(found.importer), room(found.imported)
    if importer == imported or importer in ROOT_NAMES or imported in ROOT_NAMES:
        return None
    if importer in OUTSIDE:
        allowed = imported in OUTSIDE_KNOW
        reason = f"{importer} may know only {', '.join(sorted(OUTSIDE_KNOW))}"
    elif imported in OUTSIDE:
        allowed, reason = False, f"nothing below may know {imported}"
    else:
        allowed = LEVEL.get(imported, 0) >= LEVEL.get(importer, 0)
        reason = f"{imported} is above {importer}"
    return None if allowed else f"{found.importer}:{found.line} imports {found.imported}: {reason}"


def test_every_module_has_a_floor() -> None:
    homeless = {room(name) for name in modules()} - set(LEVEL) - set(OUTSIDE) - ROOT_NAMES
    assert not homeless, f"give {sorted(homeless)} a floor in tests/test_layers.py"


def test_the_house_that_contributing_draws_has_every_floor() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = text.split("## The house")[1].split("```")[1].strip().splitlines()
    assert len(drawn) == len(FLOORS)
    for line, floor in zip(drawn, FLOORS, strict=True):
        names = set(line.split("  ")[0].split(", "))
        assert names == {name for name in floor if not name.startswith("config_")}


def test_imports_point_down() -> None:
    assert len(imports()) > 50, "the syntax tree shows too few imports: the test looks in the wrong place"
    assert [text for text in map(violation, imports()) if text] == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("rlkit.runs.loop", "rlkit.trainers.ppo"),
        ("rlkit.algorithms.kl", "rlkit.batch"),
        ("rlkit.cli.watch", "rlkit.metrics.tracker"),
        ("rlkit_widgets.feed", "rlkit.trainers.base"),
        ("rlkit_widgets.feed", "rlkit.cli.view"),
        ("rlkit.trainers.base", "rlkit_widgets"),
    ],
)
def test_an_arrow_that_points_up_is_found(importer: str, imported: str) -> None:
    assert violation(Import(importer, imported, 1, inside=True, typing_only=False)) is not None


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for found in imports():
        if not found.inside and not found.typing_only:
            graph[found.importer].add(found.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' -> '.join(error.args[1])}")


def test_environment_variables_are_read_in_one_file() -> None:
    readers = set()
    for name in modules():
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb"):
                readers.add(name)
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                readers |= {name for alias in node.names if alias.name in ("environ", "getenv")}
    assert readers == {"rlkit.env"}
