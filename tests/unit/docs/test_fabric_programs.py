"""docs/fabric-programs.md has what the tests over the fabric run and leave out."""

from __future__ import annotations

import re
from pathlib import Path

from tests.fabric import pyverbs_left_out as pyverbs
from tests.fabric.foreign import CASES, LEFT_OUT, PACKAGES, SHOWS

PAGE = (Path(__file__).parents[3] / "docs/fabric-programs.md").read_text()
PROSE = " ".join(PAGE.split())


def rows(heading: str, number: int = 0) -> list[list[str]]:
    """The rows of a table below a heading, without its head."""
    part = re.split(r"^## ", PAGE, flags=re.M)
    below = next(each for each in part if each.startswith(heading))
    tables = re.findall(r"(?:^\|.*\n)+", below, re.M)
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in tables[number].splitlines()[2:]
    ]


def test_the_programs() -> None:
    told = {(name, package): shows for name, package, shows in rows("Programs of rdma-core")}
    assert told == {
        (f"`{name}`", package): shows
        for package, programs in SHOWS.items()
        for name, shows in programs.items()
    }
    assert rows("Programs of rdma-core", 1) == [
        [f"`{name}`", why] for name, why in LEFT_OUT.items()
    ]
    shown = [shows for programs in SHOWS.values() for shows in programs.values()]
    refused = sum(shows.startswith("refused: ") for shows in shown)
    assert f"{len(shown)} programs in {len(CASES)} runs; {refused} of the programs" in PROSE
    for package, version in PACKAGES.items():
        assert f"{package} {version}" in PROSE


def test_the_tests_of_pyverbs() -> None:
    for number, kind in enumerate((pyverbs.LEFT_OUT, pyverbs.MACHINE)):
        told = [[each.subject, str(each.count), each.why] for each in kind]
        assert rows("pyverbs' own tests", number) == told
    left_out = sum(each.count for each in (*pyverbs.LEFT_OUT, *pyverbs.MACHINE))
    told_counts = f"{pyverbs.PASSED} pass, none fails, {left_out} are left out"
    assert f"Of rdma-core {pyverbs.VERSION}, " in PROSE
    assert told_counts in PROSE
