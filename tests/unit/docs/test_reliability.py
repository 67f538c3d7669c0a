"""The rows of the matrix of faults, their tests and the pages made of them fit together."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reliability.md").read_text()
TESTS = (ROOT / "docs/contributing/reliability.md").read_text()
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


def test_the_pages_have_the_rows_and_their_tests(tool: ModuleType) -> None:
    rows = tool.load_rows()
    for name, row in rows.items():
        lines = (tool.line_of(name, row, done=done) for done in (True, False))
        assert any(line in PAGE for line in lines), name
        begin = TESTS.index(f"\n- **{name}** {row['fault']}: ")
        told = TESTS[begin + 1 :].partition("\n- **")[0]
        for note in tool.notes(row):
            assert f"\n  - {note}\n" in told + "\n", (name, note)


def test_the_pages_say_which_are_shown(tool: ModuleType) -> None:
    found = re.search(r"^(\d+) of (\d+) rows are shown\.$", TESTS, re.M)
    assert found
    shown, rows = map(int, found.groups())
    assert rows == len(NAMES)
    assert shown == rows - len(re.findall(r"^\| \*\*\w+\*\* \(not shown\) ", PAGE, re.M))
    assert shown >= 62
    assert not re.search(r"\d+ failed", TESTS)


def test_the_results_of_a_row(tool: ModuleType) -> None:
    results = {"a": {"fabric": Counter(passed=2)}, "b": {"fabric": Counter(passed=1, failed=3)}}
    assert tool.passed(["a"], "fabric", results) == "fabric 2"
    assert tool.passed(["a", "b"], "fabric", results) == "fabric 3 failed"
    assert tool.passed(["a"], "iWARP", results) == ""
