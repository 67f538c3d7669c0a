"""The README shows the example files as they are, names files that exist, and links that lead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", ["examples/server.py", "examples/client.py"])
def test_the_examples_are_shown_as_they_are(name: str) -> None:
    shown = re.search(rf"^`{re.escape(name)}`:\n\n```python\n(.*?)^```$", README, re.M | re.S)
    assert shown, f"README.md does not show {name}"
    assert shown[1] == (ROOT / name).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    # An address is no path (test_package.py follows those of the repository), nor is a header of C.
    text = re.sub(r"https://\S+|#include <\S+>", "", page.read_text())
    # src/ paths are given from the root or, in pictures, from the package.
    named = set(re.findall(r"\b((?:[\w.]+/)+\w+\.(?:py|c|h|md|toml))\b", text))
    missing = [
        name
        for name in named
        if not any((base / name).is_file() for base in (ROOT, ROOT / "aiordma", page.parent))
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$ make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
