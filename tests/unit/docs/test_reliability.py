"""The rows of the matrix of faults, their tests and the page that is made of them fit together."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reliability.md").read_text()
#: How many rows each kind has.
KINDS = {"N": 14, "P": 8, "D": 4, "Q": 8, "R": 7, "A": 9, "F": 3, "S": 8, "E": 4}
NAMES = [f"{kind}{number}" for kind, count in KINDS.items() for number in range(1, count + 1)]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The program that writes the page."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        path = ROOT / "tools/reliability_table.py"
        spec = importlib.util.spec_from_file_location("reliability_table", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


@functools.cache
def functions_of(file: str) -> set[str]:
    """The tests of a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.parse((ROOT / file).read_text()).body
    return {each.name for each in nodes if isinstance(each, kinds) and each.name.startswith("test")}


def test_there_are_65_rows_in_their_order(tool: ModuleType) -> None:
    assert list(tool.load_rows()) == NAMES
    assert len(NAMES) == 65


def test_each_row_has_tests_that_exist_or_a_reason(tool: ModuleType) -> None:
    for name, row in tool.load_rows().items():
        assert set(row) <= {"fault", "sees", "differs", "shown_by", "missing"}, name
        assert row["fault"], name
        assert row["sees"], name
        assert ("shown_by" in row) != ("missing" in row), name
        tests = row.get("shown_by", [])
        assert len(tests) == len(set(tests)), name
        for test in tests:
            file, _, function = test.partition("::")
            assert function.partition("[")[0] in functions_of(file), test


def test_each_test_over_the_fabric_belongs_to_the_row_of_its_name(tool: ModuleType) -> None:
    rows = tool.load_rows()
    for path in sorted((ROOT / "tests/fabric").glob("matrix_*.py")):
        file = f"tests/fabric/{path.name}"
        for function in functions_of(file):
            named = re.findall(r"(?<=_)([a-z])(\d\d)(?=_)", function)
            assert named, function
            for letter, number in named:
                row = f"{letter.upper()}{int(number)}"
                shown_by = {test.partition("[")[0] for test in rows[row]["shown_by"]}
                assert f"{file}::{function}" in shown_by, (function, row)


def test_the_page_has_the_rows_and_their_tests(tool: ModuleType) -> None:
    rows = tool.load_rows()
    for name, row in rows.items():
        assert re.search(rf"^\| {name}(?: \(not shown\))? \| ", PAGE, re.M), name
        assert f" | {row['fault']} | {row['sees']} | " in PAGE, name
        for line in tool.notes(name, row):
            assert line in PAGE, name


def test_the_page_says_which_are_shown(tool: ModuleType) -> None:
    found = re.search(r"^(\d+) of (\d+) rows are shown\.$", PAGE, re.M)
    assert found
    shown, rows = map(int, found.groups())
    assert rows == len(NAMES)
    assert shown == rows - len(re.findall(r"^\| \w+ \(not shown\) \|", PAGE, re.M))
    assert shown >= 62
    assert not re.search(r"\| \d+ failed \|", PAGE)
