"""The first change in CONTRIBUTING.md can be made as it is told, and so can a report."""

from __future__ import annotations

import errno
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from aiordma import error_words, errors
from tests.pages import ROOT
from tests.unit.docs import test_tables

PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_first_change_makes_its_test_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    test, line = (
        textwrap.dedent(block)
        for block in re.findall(r"^ +```python\n(.*?)^ +```$", PAGE, re.M | re.S)
    )
    names: dict[str, Any] = {"errno": errno, "errors": errors}
    exec(test, names)
    [run] = (value for name, value in names.items() if name.startswith("test_"))
    [(call, hint)] = eval(f"{{{line}}}", names).items()
    monkeypatch.delitem(error_words.ERRNO_HINTS, call, raising=False)  # where somebody has made it
    with pytest.raises(AssertionError):
        run()
    monkeypatch.setitem(error_words.ERRNO_HINTS, call, hint)
    run()


def test_the_first_change_is_right_for_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = re.findall(r"^ +(\(.*),$", PAGE, re.M)
    [entry] = (
        textwrap.dedent(block)
        for block in re.findall(r"^ +```text\n(.*?)^ +```$", PAGE, re.M | re.S)
    )
    [(call, hint)] = eval(f"{{{line}}}", {"errno": errno}).items()
    monkeypatch.setitem(error_words.ERRNO_HINTS, call, hint)
    term, told = entry.splitlines()[0], test_tables.terms("errors.md")
    monkeypatch.setattr(test_tables, "terms", lambda _: [*told, term])
    test_tables.test_every_call_with_a_hint_is_in_the_table()


def test_the_table_has_the_folders() -> None:
    named = re.findall(
        r"`([\w/]+/)`", PAGE.partition("## Where things are")[2].partition("\n## ")[0]
    )
    assert len(named) > 12
    assert [name for name in named if not (ROOT / name).is_dir()] == []
    folders = {f"aiordma/{path.name}/" for path in (ROOT / "aiordma").iterdir() if path.is_dir()}
    assert folders - {"aiordma/__pycache__/"} <= set(named)


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 100


@pytest.mark.parametrize("name", ["bug", "question"])
def test_a_form_asks_for_what_is_needed(name: str) -> None:
    text = (Path(ROOT) / f".github/ISSUE_TEMPLATE/{name}.yml").read_text()
    assert len(set(re.findall(r"^    id: (\w+)$", text, re.M))) == text.count("  - type: ")
    if name == "bug":
        for asked in ("aiordma doctor", "A program", "Adapter"):
            assert asked in text, asked
