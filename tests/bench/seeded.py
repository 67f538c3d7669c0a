"""Whether `make bench-check` sees a loss of five percent: in each of the places of seeds.py.

    python -m tests.bench.seeded [--loss 0.05] [TEXT...]    places with one of these in their names

The loss is put into a copy of what is committed, a git worktree of its own, one place at a time.
The rows that the place concerns are measured there as the check does, and held against the same
tree without a loss, with their bands in recorded.json.  A loss is seen if the check would fail for
one of them; the status is 1 if one was not seen.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.bench import check, machine, run, tables
from tests.bench.goals import Goal, Results, judge, sample
from tests.bench.machine import FOLDER, ROOT, Measured
from tests.bench.seeds import PLACES, Place, seeded

LOSS = 0.05
HEAD = ("place", "row", "change", "band", "")


@contextmanager
def copy() -> Iterator[Path]:
    """A worktree of what is committed, built; it is removed at the end."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix="seeded-") as folder:
        tree = Path(folder, "tree")
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run((*git, "add", "-q", "--detach", str(tree), "HEAD"), check=True)
        try:
            build(tree)
            yield tree
        finally:
            subprocess.run((*git, "remove", "--force", str(tree)), check=True)


def build(tree: Path) -> None:
    """Compile what has changed.

    Raises:
        subprocess.CalledProcessError: The compiler refuses; it has said why.
    """
    subprocess.run(
        (sys.executable, "setup.py", "-q", "build_ext", "--inplace"), cwd=tree, check=True
    )


def measure(tree: Path, names: Sequence[str]) -> Measured:
    """Run jobs with the library of this tree."""
    raw = tree / "seeded.jsonl"
    raw.unlink(missing_ok=True)
    words = (sys.executable, "-m", "tests.bench.seeded", "--here", str(raw), *names)
    subprocess.run(words, cwd=tree, check=True)
    return machine.read(raw, run.everything())


def measure_here(raw: Path, names: Sequence[str]) -> int:
    """Run jobs with the library of this process."""
    every = [job for job in run.everything() if job.name in names]
    machine.run(every, Measured(), raw, rounds=run.CHECK_ROUNDS)
    return 0


def loss_ns(place: Place, results: Results, loss: float) -> float:
    """How long the loop has to take."""
    job = place.rows[0][0]
    us = sample(results, (job, "us"))
    if us is None:
        msg = f"{job} was not measured"
        raise ValueError(msg)
    return loss * us.median * 1000 / place.entered


def lose(tree: Path, place: Place, base: Results, loss: float) -> list[check.Compared]:
    """Put the loss in, measure, and take it out again."""
    file = tree / "aiordma" / place.path
    before = file.read_text()
    file.write_text(seeded(place, before, loss_ns(place, base, loss)))
    try:
        build(tree)
        there = measure(tree, [job for job, _ in place.rows])
    finally:
        file.write_text(before)
    return compared(place.goals(), base, there.results)


def compared(rows: Sequence[Goal], base: Results, there: Results) -> list[check.Compared]:
    """The rows with the loss beside the rows without, as the check compares."""
    now, then = ([judge(row, found) for row in rows] for found in ({**base, **there}, base))
    bands = check.read().get("rows", {})
    before = {
        check.key(row): {
            "ratio": row.value,
            "band": bands.get(check.key(row), {}).get("band", check.BAND),
        }
        for row in then
    }
    return check.compare(now, {"rows": before})


def main(words: Sequence[str] | None = None) -> int:
    """Try the places; returns the exit status."""
    parser = argparse.ArgumentParser(description="Whether bench-check sees a loss.")
    parser.add_argument("--loss", type=float, default=LOSS, help=f"part of the figure [{LOSS}]")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="TEXT", help="places with one of these")
    options = parser.parse_args(words)
    if options.here:
        return measure_here(options.here, options.names)
    texts = options.names or [""]
    places = [place for place in PLACES if any(text in place.name for text in texts)]
    rows = []
    missed = 0
    with copy() as tree:
        goals = [goal for place in places for goal in place.goals()]
        needed = {where[0] for goal in goals for where in (goal.ours, goal.theirs) if where}
        base = measure(tree, sorted(needed))
        if run.finish(base):
            return 1
        for place in places:
            found = lose(tree, place, base.results, options.loss)
            seen = any(row.verdict == "SLOWER" for row in found)
            missed += not seen
            said = ["seen" if seen else "NOT SEEN", *[""] * len(found)]
            for row, word in zip(found, said, strict=False):
                _, _, _, change, band, _ = tables.check_row(row)
                rows.append((place.name, row.name, change, band, word))
                print(*rows[-1], sep="  ", flush=True)
    print(tables.plain(HEAD, rows))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
