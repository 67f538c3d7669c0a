"""The pictures of docs/benchmarks-all.md, as SVG that is the same for the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from tests.bench.goals import Outcome, Results, sample
from tests.bench.sweeps import Sweep

# No random names in the files; text stays text.
mpl.rc("svg", hashsalt="aiordma", fonttype="none")


def points(results: Results, curve: Sweep, who: str) -> list[tuple[int, float]]:
    """The points of one line that were measured."""
    found = (
        (point, sample(results, (curve.job_name(who, point), curve.unit))) for point in curve.points
    )
    return [(point, each.median) for point, each in found if each is not None]


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    # matplotlib ends lines of paths with blanks.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def over(results: Results, curves: Sequence[Sweep], label: str, path: Path) -> None:
    """Ours and the others' over the size or the depth, both axes logarithmic; theirs are dashed."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, curve in enumerate(curves):
        for who, style, name in (
            ("ours", "-", f"{curve.name}, aiordma"),
            ("theirs", "--", curve.beside),
        ):
            line = points(results, curve, who)
            if line:  # an axis of logarithms needs some
                axes.plot(
                    *zip(*line, strict=True),
                    style,
                    color=f"C{number}",
                    marker="o",
                    markersize=3,
                    label=name,
                )
    if axes.lines:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(fontsize=8)
    axes.set_xlabel("bytes of a message" if curves[0].over == "size" else "requests under way")
    axes.set_ylabel(label)
    axes.grid(visible=True, which="both", alpha=0.3)
    _save(figure, path)


def ratios(rows: Sequence[Outcome], path: Path) -> None:
    """A bar for each ratio, how much better or worse than the other, and a mark at its goal."""
    shown = [row for row in rows if row.goal.theirs and row.goal.wanted and row.value is not None]
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
