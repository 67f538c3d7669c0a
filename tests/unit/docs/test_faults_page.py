"""docs/faults.md says what aiordma.testing.faults has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from aiordma.testing import faults

PAGE = (Path(__file__).parents[3] / "docs" / "faults.md").read_text()


def section(title: str) -> str:
    """The text of a section."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_table_of_faults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)\(([^`]*)\)` \|", section("The faults"), re.M))
    functions = {name for name in faults.__all__ if inspect.isfunction(getattr(faults, name))}
    assert set(rows) == functions
    for name, words in rows.items():
        named = [word.strip("= ") for word in words.split(",")]
        assert named == list(inspect.signature(getattr(faults, name)).parameters)


def test_the_table_of_calls() -> None:
    rows = re.findall(r"^\| (both|the fabric) \| (.*) \|$", section("Calls that can fail"), re.M)
    found = {
        where: {
            call for row, calls in rows if row == where for call in re.findall(r"`(\w+)`", calls)
        }
        for where in ("both", "the fabric")
    }
    assert found["both"] == faults.CALLS_OF_DEVICES
    assert found["the fabric"] == faults.CALLS - faults.CALLS_OF_DEVICES


def test_calls_that_need_no_table_of_addresses() -> None:
    """The first row of the table is what every processor has."""
    first = re.findall(r"^\| both \| (.*) \|$", section("Calls that can fail"), re.M)[0]
    text = (Path(faults.__file__).parent / "_shim.c").read_text()
    wrapped = set(re.findall(r"X\((\w+)\)", text.partition("#define EACH_OP(X)")[2][:300]))
    assert {call.removeprefix("ibv_") for call in re.findall(r"`(\w+)`", first)} == wrapped
