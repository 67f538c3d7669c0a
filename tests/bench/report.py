"""Writes what was measured: docs/benchmarks.json, the pictures, and the tables of the pages.

The pages' text is written by hand; only what stands between two markers is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tests.bench import sweeps
from tests.bench.goals import Outcome
from tests.bench.jobs import Job
from tests.bench.machine import ROOT, Measured
from tests.bench.pages import PAGES

DOCS = ROOT / "docs"


def between(text: str, name: str, new: str, kind: str = "bench") -> str:
    """Replace what stands between the two markers of this name.

    Args:
        text: The page.
        name: Of the markers.
        new: What is to stand there.
        kind: What writes it.

    Raises:
        ValueError: They are not there.
    """
    begin, end = f"<!-- {kind}: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        msg = f"the page has no pair of markers {begin!r} and {end!r}"
        raise ValueError(msg)
    return pattern.sub(lambda _: f"{begin}\n\n{new}\n\n{end}", text)


def page(text: str, name: str, measured: Measured, rows: Sequence[Outcome]) -> str:
    """The page of this name with its tables made new."""
    for marker, make in PAGES[name].items():
        text = between(text, marker, make(measured, rows))
    return text


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


def kept(every: Sequence[Job]) -> Measured:
    """What the pages were written with, of the jobs that there still are."""
    there = json.loads((DOCS / "benchmarks.json").read_text())
    names = {job.name for job in every}
    results = {
        (row["program"], row["figure"]): row["rounds"]
        for row in there["figures"]
        if row["program"] in names
    }
    return Measured(results, there["failures"], there["versions"])


def write(measured: Measured, rows: Sequence[Outcome], docs: Path = DOCS) -> None:
    """Write everything."""
    from tests.bench import plots  # matplotlib is there for `make bench` alone

    for name in PAGES:
        path = docs / name
        path.write_text(page(path.read_text(), name, measured, rows))
    (docs / "benchmarks.json").write_text(document(measured, rows) + "\n")
    results = measured.results
    for name, curves, label in (
        ("latency", [sweeps.LATENCY], "half a round trip, us"),
        ("bandwidth", sweeps.OVER_SIZE, "bandwidth, MiB/s"),
        ("depth", sweeps.OVER_DEPTH, f"bandwidth at {sweeps.DEPTH_SIZE:,} bytes, MiB/s"),
    ):
        plots.over(results, curves, label, docs / f"benchmarks-{name}.svg")
    plots.ratios(rows, docs / "benchmarks-ratios.svg")
