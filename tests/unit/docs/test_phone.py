"""Each table of a page fits a phone: 360 pixels, or about 48 characters of a table's text.

A browser makes a column as narrow as its longest word, so that a table is as wide as the longest
words of its columns together.  docs/conf.py lets a name of code go on in the next line where it has
a joint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import DOCS, ROOT

PAGES = sorted(DOCS.rglob("*.md"))
#: Characters, and what the space beside the text of a cell takes of them.
WIDTH, SPACE = 48, 1.5
#: Five are few enough to be read if they are figures.
COLUMNS = 5


def _joint() -> re.Pattern[str]:
    """Where docs/conf.py breaks a name of code; the file itself needs Sphinx."""
    source = (DOCS / "conf.py").read_text()
    [pattern] = re.findall(r'^_JOINT = re\.compile\(r"(.*)"\)$', source, re.M)
    return re.compile(pattern)


JOINT = _joint()


def words(cell: str) -> Iterator[str]:
    """The pieces of a cell that a browser does not break."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell)
    for piece in re.split(r"(`[^`]*`)", shown):
        if piece.startswith("`"):
            yield from JOINT.sub(" ", piece.strip("`")).split()
        else:
            yield from re.split(r"\s+|(?<=[-/])(?=\w)", piece.replace("*", ""))


def tables(text: str) -> Iterator[tuple[int, list[list[str]]]]:
    """The line of each table, and its rows without the rule below the head."""
    text = re.sub(
        r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S
    )
    for found in re.finditer(r"^(\|.*\|\n)\|[ :|-]+\|\n((?:\|.*\|\n)*)", text, re.M):
        lines = (found[1] + found[2]).splitlines()
        rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in lines
        ]
        yield text[: found.start()].count("\n") + 1, rows


def width(rows: list[list[str]]) -> float:
    """The least width of a table, in characters."""
    columns = zip(*rows, strict=True)
    return sum(
        max(len(word) for cell in column for word in words(cell)) + SPACE for column in columns
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_table_fits_a_phone(page: Path) -> None:
    for line, rows in tables(page.read_text()):
        where = f"{page.relative_to(ROOT)}:{line}"
        assert width(rows) <= WIDTH, f"{where}: {width(rows)} characters"
        assert len(rows[0]) <= COLUMNS, where


def test_what_does_not_fit_is_found() -> None:
    narrow = "| a | b |\n| --- | --- |\n| `one_name.of_code` | two words |\n"
    [(line, rows)] = tables(f"text\n\n{narrow}\n```text\n{narrow}```\n")
    assert (line, len(rows)) == (3, 2)
    assert width(rows) == len("_name.") + SPACE + len("words") + SPACE
    assert width([*rows, ["x", "y" * 48]]) > WIDTH
