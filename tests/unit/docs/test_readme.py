"""The README and the pages name files that exist, links that lead, and figures that are guarded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.pages import blocks

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
#: A test that a page names, as pytest does.
_TEST = re.compile(r"`((?:softroce/)?tests/[\w/]+\.py)::(\w+)")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "softroce/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/contributing").glob("*.md")),
]


@pytest.mark.parametrize("name", ["examples/server.py", "examples/client.py"])
def test_the_two_programs_are_shown_as_they_are(name: str) -> None:
    assert f"`{name}`" in README
    [shown] = [block for block in blocks("tutorial.md") if block.name == name]
    assert shown.text == (ROOT / name).read_text()


#: The rows of the README's table, and the guarded ratios beside C and TCP.
FIGURES = {
    "message of 64 bytes, half a round trip": (
        "echo, 64 B, half round trip / ib_send_lat -e", "echo, 64 B, half round trip / TCP",
    ),
    "request of 200 bytes and its answer, 100 callers": ("", "a request, 100 callers / TCP"),
    "read of 64 bytes in the peer's memory": ("READ, 64 B, bytearray / ib_read_lat -e", ""),
    "**bulk: blocks of 64 KiB over a stream**": (
        "stream bandwidth, 64 KiB, write and drain / rstream",
        "stream bandwidth, 64 KiB, write and drain / TCP",
    ),
    "connections a second, 50 at once": ("connections a second, 50 at once / cmtime", ""),
}  # fmt: skip
#: Ratios drift by as much between two days on which they are recorded.
NEAR = 0.04


def test_the_figures_are_those_that_are_guarded() -> None:
    recorded = json.loads((ROOT / "tests/bench/recorded.json").read_text())["rows"]
    table = README.partition("## How fast")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\| .*\|$", table, re.M)[2:]
    ]
    assert [name for name, *_ in rows] == list(FIGURES)
    for name, *cells in rows:
        ours, *others = (float(re.sub(r"[^\d.]", "", cell)) if cell else None for cell in cells)
        assert ours
        for other, guarded in zip(others, FIGURES[name], strict=True):
            assert (other is None) == (not guarded), name
            if other is not None:
                ratio = recorded[guarded]["ratio"]
                assert abs(ours / other - ratio) <= NEAR * ratio, (name, ours / other, ratio)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    # An address is no path (test_package.py follows those of the repository), nor is a header of C.
    text = re.sub(r"https://\S+|#include <\S+>", "", page.read_text())
    # Paths are given from the root, in pictures from the package, in links with ../ before them.
    bases = (ROOT, ROOT / "aiordma", ROOT / "docs")
    named = set(re.findall(r"\b((?:[\w.]+/)+\w+\.(?:py|c|h|md|toml))\b", text))
    missing = [
        name for name in named if not any((base / name).is_file() for base in (*bases, page.parent))
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, name in _TEST.findall(page.read_text()):
        text = (ROOT / file).read_text()
        assert f"def {name}(" in text or f"class {name}" in text, f"{file}::{name}"


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$ make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_demo_and_the_readme_say_what_its_figures_are() -> None:
    demo = (ROOT / "examples/demo.py").read_text()
    for text in (README, demo):
        said = " ".join(re.sub(r'[\\"]n?|\*', "", text).split())
        assert "no comparison" in said
        assert "either may come out ahead" in said
    assert "README.md and docs/benchmarks.md have figures that compare" in demo
    assert "aiordma#how-fast)" in README
    assert "\n## How fast\n" in README
