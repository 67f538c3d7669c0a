"""Writes what was measured: docs/benchmarks.json, the pictures, and the tables of the page.

The page's text is written by hand; only what stands between two markers is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tests.bench import jobs, tables
from tests.bench.goals import Outcome, Sample
from tests.bench.machine import ROOT, Measured
from tests.bench.tables import Row

DOCS = ROOT / "docs"
PAGE = "benchmarks.md"
FIGURES_HEAD = ("program", "figure", "median", "rounds")


def between(text: str, name: str, new: str) -> str:
    """Replace what stands between the two markers of this name.

    Raises:
        ValueError: They are not there.
    """
    begin, end = f"<!-- bench: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        msg = f"the page has no pair of markers {begin!r} and {end!r}"
        raise ValueError(msg)
    return pattern.sub(lambda _: f"{begin}\n\n{new}\n\n{end}", text)


def figure_rows(measured: Measured, names: Sequence[str]) -> list[Row]:
    """All figures of these jobs."""
    found: list[Row] = []
    for name in names:
        for (job, figure), values in measured.results.items():
            if job == name:
                sample = Sample(tuple(values))
                cell = tables.amount(sample, figure)
                found.append((f"`{job}`", figure, cell, str(len(values))))
    return found


def page(text: str, measured: Measured, rows: Sequence[Outcome]) -> str:
    """The page with its tables made new."""
    others = [job.name for job in jobs.programs()]
    goals = tables.markdown(tables.GOAL_HEAD, [tables.goal_row(row) for row in rows])
    text = between(text, "goals", goals)
    for marker, names in (
        ("aiordma", [job.name for job in jobs.ours()]),
        ("others", others),
        ("spinning", [job.name for job in jobs.SPINNING]),
        ("growth", [job.name for job in jobs.growth()]),
    ):
        table = tables.markdown(FIGURES_HEAD, figure_rows(measured, names))
        text = between(text, marker, table)
    versions = "\n".join(f"- {name} {value}" for name, value in measured.versions.items())
    return between(text, "versions", versions)


def document(measured: Measured, rows: Sequence[Outcome]) -> str:
    """The same for programs."""
    return json.dumps(
        {
            "versions": measured.versions,
            "failures": measured.failures,
            "goals": [
                {
                    "figure": row.goal.figure,
                    "beside": row.goal.beside,
                    "ours": row.ours.median if row.ours else None,
                    "theirs": row.theirs.median if row.theirs else None,
                    "value": row.value,
                    "goal": row.goal.wanted,
                    "verdict": row.verdict,
                }
                for row in rows
            ],
            "figures": [
                {"program": job, "figure": name, "rounds": values}
                for (job, name), values in measured.results.items()
            ],
        },
        indent=1,
    )


def write(measured: Measured, rows: Sequence[Outcome], docs: Path = DOCS) -> None:
    """Write everything."""
    from tests.bench import plots  # matplotlib is there for `make bench` alone

    path = docs / PAGE
    path.write_text(page(path.read_text(), measured, rows))
    (docs / "benchmarks.json").write_text(document(measured, rows) + "\n")
    results = measured.results
    plots.over_size(results, "lat", "us", "half a round trip, us", docs / "benchmarks-latency.svg")
    plots.over_size(results, "bw", "MiB/s", "bandwidth, MiB/s", docs / "benchmarks-bandwidth.svg")
    plots.ratios(rows, docs / "benchmarks-ratios.svg")
