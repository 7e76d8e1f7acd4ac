"""Each requirement that one device can show has one file here, named after its number, whose tests all count."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NUMBERS = [f"r{number:02d}" for number in range(1, 17)]


@pytest.mark.parametrize("number", NUMBERS)
def test_each_requirement_has_one_file_that_says_which_it_is(number: str) -> None:
    (path,) = HERE.glob(f"test_{number}_*.py")
    module = ast.parse(path.read_text(encoding="utf-8"))
    assert (ast.get_docstring(module) or "").startswith(f"{number.upper()}: ")
    tests = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert tests
    for test in tests:
        checks = [node for node in ast.walk(test) if isinstance(node, ast.Assert | ast.With)]
        calls = [ast.unparse(node.func) for node in ast.walk(test) if isinstance(node, ast.Call)]
        assert checks or any("assert_close" in call or call == "_close" for call in calls), test.name


def test_no_other_file_claims_a_requirement_of_one_device() -> None:
    """So that what holds rlkit to a requirement is found in one place."""
    for path in HERE.parent.rglob("test_*.py"):
        if path.parent != HERE:
            names = [
                n.name for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)
            ]
            assert not [name for name in names if name[5:8] in NUMBERS], path
