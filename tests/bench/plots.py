"""The pictures of docs/benchmarks.md, as SVG that is the same for the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from tests.bench.goals import Outcome, Results

# No random names in the files; text stays text.
mpl.rc("svg", hashsalt="aiordma", fonttype="none")
_NAMES = {"aiordma": "aiordma, uvloop", "C": "perftest -e"}


def curve(results: Results, metric: str, who: str, unit: str) -> list[tuple[int, float]]:
    """The points of one line, by size."""
    prefix = f"curve {metric} {who} "
    return sorted(
        (int(job.removeprefix(prefix)), values[0])
        for (job, name), values in results.items()
        if job.startswith(prefix) and name == unit
    )


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    # matplotlib ends lines of paths with blanks.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def over_size(results: Results, metric: str, unit: str, label: str, path: Path) -> None:
    """Both lines over the size of a message, both axes logarithmic."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for who, name in _NAMES.items():
        points = curve(results, metric, who, unit)
        sizes, values = [size for size, _ in points], [value for _, value in points]
        if points:  # an axis of logarithms needs some
            axes.plot(sizes, values, marker="o", markersize=4, label=name)
    if axes.lines:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend()
    axes.set_xlabel("bytes of a message")
    axes.set_ylabel(label)
    axes.grid(visible=True, which="both", alpha=0.3)
    _save(figure, path)


def ratios(rows: Sequence[Outcome], path: Path) -> None:
    """A bar for each ratio, how much better or worse than the other, and a mark at its goal."""
    shown = [row for row in rows if row.goal.theirs is not None and row.value is not None]
    shown.reverse()
    figure = Figure(figsize=(8, 0.32 * len(shown) + 1.2), layout="constrained")
    axes = figure.subplots()
    names = [f"{row.goal.figure} / {row.goal.beside}" for row in shown]
    values = [row.value or 0.0 for row in shown]
    colors = ["tab:green" if row.verdict == "reached" else "tab:red" for row in shown]
    axes.barh(range(len(shown)), values, color=colors, height=0.6)
    axes.set_yticks(range(len(shown)), names, fontsize=7)
    for number, row in enumerate(shown):
        axes.plot([row.goal.limit] * 2, [number - 0.4, number + 0.4], color="black")
    axes.axvline(1, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("ours / theirs; black: the goal")
    axes.margins(y=0.01)
    _save(figure, path)
