"""Each surprise has a line for contributors, and the pages for users name no test."""

from __future__ import annotations

import re

import pytest

from tests.pages import DOCS

PAGE = (DOCS / "surprises.md").read_text()
TESTS = (DOCS / "contributing/surprises.md").read_text()


def lines(text: str, item: str) -> list[str]:
    """The headings, and what each item of the lists begins with."""
    joined = re.sub(r"\n  +", " ", text)
    return re.findall(rf"^(?:## .*|- {item})", joined, re.M)


def test_each_surprise_says_whether_a_test_notices_it() -> None:
    named = [line.replace("**", "").rstrip(".:") for line in lines(PAGE, r"\*\*.*?\*\*")]
    assert len(named) > 100
    told = lines(TESTS, ".*")
    for name, line in zip(named, told, strict=True):
        assert line == name or line.startswith(f"{name}: "), (name, line)
        if line != name:
            assert re.search(r"`(softroce/)?tests/|no test|the program `\w+`", line), line


@pytest.mark.parametrize("page", ["surprises", "reliability"])
def test_a_page_for_users_names_no_test(page: str) -> None:
    assert not re.search(r"\btest_\w+|\btests/", (DOCS / f"{page}.md").read_text())
