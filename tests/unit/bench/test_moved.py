"""The bytes that the processor moves: what is read, and what has to be said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import moved
from tests.bench.into_peer import COUNT, SIZE

ALL = COUNT * SIZE


def counted(*windows: tuple[float, float]) -> str:
    """As accesses.c writes it."""
    lines = (f"{round(a * ALL)} {round(b * ALL)} {6 * ALL} {7 * ALL}\n" for a, b in windows)
    return "".join(f"\n{line}" for line in lines)


GOOD = ((0.1, 0.06), (2.1, 0.06), (1.1, 1.06))


def test_good_counts() -> None:
    found = moved.parse(counted(*GOOD))
    assert [fault for each in found for fault in each.faults] == []
    assert found[0].row == ("`recv_into`", "0.100", "0.060", "6.000", "7.000")


@pytest.mark.parametrize(
    ("number", "pair", "faults"),
    [
        (0, (1.1, 1.06), 2),  # a copy
        (0, (0.1, 1.06), 1),  # memory that is cleared
        (1, (3.1, 1.06), 2),
        (1, (0.1, 0.06), 1),  # not checked
        (2, (0.1, 0.06), 2),  # the count sees no copy
        (2, (2.1, 2.06), 2),
    ],
)
def test_bad_counts(number: int, pair: tuple[float, float], faults: int) -> None:
    windows = list(GOOD)
    windows[number] = pair
    found = moved.parse(counted(*windows))
    assert len(list(found[number].faults)) == faults
    assert sum(len(list(each.faults)) for each in found) == faults


@pytest.mark.parametrize("windows", [GOOD[:2], (*GOOD, (0.1, 0.1)), ()])
def test_programs_that_were_not_counted(windows: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match=f"{len(windows)} programs were counted, of 3"):
        moved.parse(counted(*windows))


def test_the_table_is_written(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks-all.md"
    page.write_text("a\n<!-- moved: bytes -->\n<!-- end: bytes -->\nb\n")
    moved.write(moved.parse(counted(*GOOD)), tmp_path)
    text = page.read_text()
    assert text.startswith("a\n")
    assert text.endswith("b\n")
    assert "| `recv_into` | 0.100 | 0.060 | 6.000 | 7.000 |" in text
