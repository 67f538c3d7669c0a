"""Tables as plain text, for the terminal, and as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tests.bench.check import Compared
from tests.bench.goals import Outcome, Results, Sample

GOAL_HEAD = ("figure", "beside", "ours", "theirs", "ratio", "goal", "")
PAGE_GOAL_HEAD = ("figure / beside", "ours / theirs", "ratio", "goal")
CHECK_HEAD = ("figure / beside", "recorded", "now", "change", "band", "")
FIGURES_HEAD = ("program", "figure", "median", "rounds")
PAGE_FIGURES_HEAD = ("program", "figure", "median")
_UNITS = {
    "us": "us", "us/s": "us/s", "MiB/s": "MiB/s", "Mpps": "k/s", "KiB": "KiB", "ns/B": "ns/B",
    "s": "s",
}  # fmt: skip

Row = tuple[str, ...]


def plain(head: Row, rows: Sequence[Row]) -> str:
    """Columns padded with blanks."""
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, tuple("-" * width for width in widths), *rows)
    )


def markdown(head: Row, rows: Sequence[Row]) -> str:
    """A table of a page."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("  ", " ") for cells in lines)


#: Columns of figures beside the first that a phone has room for.
ON_A_PHONE = 3


def stacked(head: Row, rows: Sequence[Row], most: int = ON_A_PHONE) -> str:
    """Tables of a page, one below the other, of at most so many columns beside the first.

    Rows that have nothing in the columns of a table are not in it.
    """
    tables = -(-(len(head) - 1) // most)
    ends = [1 + len(head[1:]) * n // tables for n in range(tables + 1)]
    texts = []
    for begin, end in itertools.pairwise(ends):
        some = [(row[0], *row[begin:end]) for row in rows if any(row[begin:end])]
        texts.append(markdown((head[0], *head[begin:end]), some))
    return "\n\n".join(texts)


def unit_of(name: str) -> str:
    """The unit at the end of a figure's name, or none."""
    last = name.rpartition(" ")[2]
    return _UNITS.get(last, "")


def amount(sample: Sample | None, name: str) -> str:
    """A median with its unit, and how far its rounds lie apart."""
    if sample is None:
        return "-"
    unit = unit_of(name)
    value = sample.median * (1000 if unit == "k/s" else 1)
    text = f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
    spread = f" ±{sample.spread / 2:.1%}" if len(sample.values) > 1 else ""
    return f"{text} {unit}".rstrip() + spread


def goal_row(outcome: Outcome) -> Row:
    """One row of the goals."""
    goal = outcome.goal
    alone = goal.theirs is None
    ratio = "" if alone else "-" if outcome.value is None else f"{outcome.value:.3f}"
    return (
        goal.figure,
        goal.beside,
        amount(outcome.ours, goal.ours[1]),
        "" if goal.theirs is None else amount(outcome.theirs, goal.theirs[1]),
        ratio,
        goal.wanted,
        outcome.verdict,
    )


def page_goal(row: Row) -> Row:
    """The same for a page, in fewer columns."""
    figure, beside, ours, theirs, ratio, wanted, verdict = row
    return (
        " / ".join(filter(None, (figure, beside))),
        " / ".join(filter(None, (ours, theirs))),
        ratio,
        ", ".join(filter(None, (wanted, verdict))),
    )


def check_row(row: Compared) -> Row:
    """One row of the check."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    change = "-" if row.change is None else f"{row.change:+.1%}"
    return (row.name, number(row.recorded), number(row.now), change, f"{row.band:.0%}", row.verdict)


def figure_rows(results: Results, names: Sequence[str]) -> list[Row]:
    """All figures of these jobs."""
    found: list[Row] = []
    for name in names:
        for (job, figure), values in results.items():
            if job == name:
                cell = amount(Sample(tuple(values)), figure)
                found.append((f"`{job}`", figure, cell, str(len(values))))
    return found


def page_figure(row: Row) -> Row:
    """The same for a page: how many rounds there were is said where it was more than one."""
    program, figure, median, rounds = row
    return (program, figure, median if rounds == "1" else f"{median}, {rounds} rounds")
