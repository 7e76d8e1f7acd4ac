"""The modules of this repository and what each imports, read from the syntax tree without running anything."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"rlkit": ROOT / "rlkit", "rlkit_widgets": ROOT / "widgets" / "rlkit_widgets"}


@dataclass(frozen=True)
class Import:
    """One module imported by another of this repository."""

    importer: str
    imported: str
    line: int
    inside: bool
    """True when it runs only when a function is called."""
    typing_only: bool
    """True when it stands below `if TYPE_CHECKING:`."""


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of both packages; a package goes by its own name."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = file
    return found


@cache
def tree(name: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(modules()[name].read_text(), filename=str(modules()[name]))


@cache
def imports() -> tuple[Import, ...]:
    """Every import of a module of this repository by another, at any depth, `import_module("...")` included."""
    return tuple(found for name in modules() for found in _of_module(name))


def _of_module(name: str) -> Iterator[Import]:
    stack: list[tuple[ast.AST, bool, bool]] = [(tree(name), False, False)]
    while stack:
        node, inside, typing_only = stack.pop()
        for target in _targets(name, node):
            if target != name:
                yield Import(name, target, getattr(node, "lineno", 0), inside, typing_only)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body
            stack.append((child, inside, typing_only or guarded))


def _targets(importer: str, node: ast.AST) -> list[str]:
    """Modules of this repository that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in modules()]
    if isinstance(node, ast.ImportFrom):
        base = _absolute(importer, node)
        if base not in modules():
            return []
        return [_named(base, alias.name) for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and first.value in modules():
            return [str(first.value)]
    return []


def _named(base: str, name: str) -> str:
    """The module that `from base import name` reaches: a submodule, the home of a lazy public name, or `base`."""
    if f"{base}.{name}" in modules():
        return f"{base}.{name}"
    if base == "rlkit":
        return lazy_names().get(name, base)
    return base


@cache
def lazy_names() -> dict[str, str]:
    """Public name -> module it is looked up in, from the tables in rlkit/__init__.py."""
    tables: dict[str, str] = {}
    for node in tree("rlkit").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("_DEFINED_IN", "_MODULES"):
            tables |= ast.literal_eval(node.value)
    return tables


def _absolute(importer: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = importer.split(".")
    is_package = modules()[importer].name == "__init__.py"
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])
