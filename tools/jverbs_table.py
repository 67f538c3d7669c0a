"""Write docs/jverbs-rows.md: what the documents of jVerbs state, the tests, and their results.

Usage: ``tools/jverbs_table.py [--check]``, after ``make test STAGES="seeds-rxe seeds-siw"``. The
statements and the exceptions are in tests/seeds/rows.py, the tests are found by their names, and
the results are read from the reports of the two stages. ``--check`` writes nothing; it fails if
the page is not what would be written.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple
from xml.etree import ElementTree

from checks import ROOT, write_page

PAGE = ROOT / "docs/jverbs-rows.md"
SEEDS = ROOT / "tests/seeds"
STAGES = {"Soft-RoCE": "seeds-rxe", "Software iWARP": "seeds-siw"}

_HEAD = """\
# jVerbs, row by row

The documents of jVerbs make these statements; [](jverbs.md) has the names on both sides. Each
statement is proved by tests that are named after it and run on Soft-RoCE and on software iWARP, by
`python -m aiordma_softroce -- python -m pytest tests/seeds`. Where software iWARP answers in
another way, the test asserts that answer, and the reason is given. A number in brackets counts the
cases of a test.

This page is written by `tools/jverbs_table.py`, from `tests/seeds/rows.py` and the reports of the
stages `seeds-rxe` and `seeds-siw`.
"""


class Test(NamedTuple):
    """A test function.

    Attributes:
        row: the statement that it proves.
        file: path from the root of the repository.
        name: of the function.
        arguments: names of its arguments.
    """

    row: int
    file: str
    name: str
    arguments: tuple[str, ...]


def load_rows() -> ModuleType:
    """The module tests/seeds/rows.py."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from tests.seeds import rows

    return rows


def find_tests() -> list[Test]:
    """All tests of statements, by row, file and line."""
    row_of = load_rows().row_of
    found: list[Test] = []
    for path in sorted(SEEDS.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                row = row_of(node.name)
                if row is not None:
                    arguments = tuple(argument.arg for argument in node.args.args)
                    file = str(path.relative_to(ROOT))
                    found.append(Test(row, file, node.name, arguments))
    return sorted(found, key=lambda test: test.row)


def read_results(stage: str) -> dict[tuple[str, str], Counter[str]]:
    """How often each test passed, failed or was skipped, by file and name; of the last run."""
    report = ROOT / "build/test" / f"{stage}.xml"
    if not report.exists():
        raise SystemExit(f"{report} is missing: make test STAGES={stage}")
    results: dict[tuple[str, str], Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = case.get("name", "").partition("[")[0]
        kinds = {child.tag for child in case}
        verdict = "failed" if kinds & {"failure", "error"} else "passed"
        results.setdefault((file, name), Counter())[
            "skipped" if "skipped" in kinds else verdict
        ] += 1
    return results


def words(counts: Mapping[str, int]) -> str:
    """A result in words: `passed`, `passed (4)` for a test with parameters, or what went wrong."""
    if not counts:
        return "not run"
    if set(counts) == {"passed"}:
        return "passed" if counts["passed"] == 1 else f"passed ({counts['passed']})"
    return ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts))


def outcome(told: Mapping[str, str]) -> str:
    """The results of a test on the devices, once where they are the same."""
    if len(set(told.values())) == 1:
        return f"{next(iter(told.values()))} on both"
    return ", ".join(f"{device} {result}" for device, result in told.items())


def page() -> str:
    """The whole page."""
    rows = load_rows()
    results = {device: read_results(stage) for device, stage in STAGES.items()}
    tests = find_tests()
    lines = [_HEAD]
    for number, statement in rows.ROWS.items():
        if number in rows.SECTIONS:
            lines.append(f"## {rows.SECTIONS[number]}\n")
        differs = rows.IWARP_DIFFERS.get(number)
        mine = [test for test in tests if test.row == number]
        untested = "" if mine else f" No test: {rows.NOT_TESTED[number]}."
        reason = f" Software iWARP: {differs}." if differs else ""
        lines.append(f"- **{number}** {statement}{reason}{untested}")
        for test in mine:
            told = {
                device: words(results[device].get((test.file, test.name), {})) for device in STAGES
            }
            lines.append(f"  - `{test.file}::{test.name}`: {outcome(told)}")
        if number + 1 in rows.SECTIONS:
            lines.append("")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_page(PAGE, page(), __doc__)
