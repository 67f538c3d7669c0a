"""`make bench` and `make bench-check`.

    python -m tests.bench.run            measure everything, print the goals, write docs/benchmarks*
    python -m tests.bench.run --check    the guarded rows against tests/bench/recorded.json
    --record                             with either: write that file
    --again                              the same once more, out of the last run of these jobs
    --only TEXT...                       jobs with one of these in their names; writes nothing
    --part                               with --only: writes the pages with these figures in place
                                         of theirs in docs/benchmarks.json

All of it runs on one emulated CPU whose clock counts instructions: see machine.py.  The status is 1
if something could not be measured, or if a checked ratio is outside its band; a goal that is missed
is a row that says so.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench import check, goals, jobs, machine, plain, sweeps, tables
from tests.bench.machine import FOLDER, Measured

#: The check takes the middle of so many rounds.
CHECK_ROUNDS = 3
GROWTH_STALL_S = 1500.0
#: Those of the ordinary programs are the first.
ROWS = (*plain.ROWS, *goals.GOALS)


def everything() -> list[jobs.Job]:
    """All that one guest does."""
    return [
        *jobs.ours(),
        *jobs.programs(),
        *plain.jobs(),
        *jobs.floors(),
        *jobs.large(),
        *jobs.first(),
        *jobs.SPINNING,
        *jobs.waits(),
        *sweeps.jobs(),
    ]


def outcomes(measured: Measured, rows: Sequence[goals.Goal]) -> list[goals.Outcome]:
    """The rows out of what was measured."""
    return [goals.judge(goal, measured.results) for goal in rows]


def guarded() -> tuple[list[goals.Goal], list[jobs.Job]]:
    """The rows of the check, and the jobs that they need."""
    rows = [goal for goal in ROWS if goal.guarded]
    needed = {where[0] for goal in rows for where in (goal.ours, goal.theirs, goal.less) if where}
    every = (*jobs.ours(), *jobs.programs(), *jobs.first(), *plain.jobs())
    return rows, [job for job in every if job.name in needed]


def named(every: Sequence[jobs.Job], only: Sequence[str]) -> list[jobs.Job]:
    """The jobs with one of these texts in their names; all of them without a text."""
    return [job for job in every if not only or any(text in job.name for text in only)]


def files(only: Sequence[str] = ()) -> tuple[Path, Path]:
    """Where the output of the jobs is kept, and that of the programs for growth."""
    part = f"only-{re.sub(r'[^a-z0-9]+', '-', ' '.join(only).lower())}-" if only else ""
    return FOLDER / f"{part}bench.jsonl", FOLDER / f"{part}growth.jsonl"


def grow(only: Sequence[str]) -> int:
    """Run the programs for growth, one boot each: 1,000 connections leave traces in the kernel."""
    for job in named(jobs.growth(), only):
        machine.run([job], Measured(), files(only)[1], stall_s=GROWTH_STALL_S)
    return 0


def kept(only: Sequence[str] = ()) -> Measured:
    """What the last run has found."""
    measured = Measured()
    for raw, every in zip(files(only), (everything(), jobs.growth()), strict=True):
        if raw.exists():
            measured.merge(machine.read(raw, every))
        elif not only:
            measured.failures.append(f"nothing was measured: {raw} is not there")
    return measured


def measure(only: Sequence[str], rounds: int | None) -> Measured:
    """Run all jobs with one of these texts in their names.

    What is not counted runs first, and alone.  The programs for growth run beside the others, in
    guests of their own: what a guest's clock counts does not depend on what else the machine does.
    A process of their own has its own Ctrl-C.
    """
    for raw in files(only):
        raw.unlink(missing_ok=True)
    chosen = named(everything(), only)
    if others := [job for job in chosen if not job.counted]:
        machine.run(others, Measured(), files(only)[0])
    chosen = [job for job in chosen if job.counted]
    words = (sys.executable, "-m", "tests.bench.run", "--growth", "--only", *only)
    with subprocess.Popen(words, cwd=machine.ROOT) as beside:
        try:
            if chosen:
                machine.run(chosen, Measured(), files(only)[0], rounds=rounds)
        except BaseException:
            beside.send_signal(signal.SIGINT)
            raise
    measured = kept(only)
    if beside.returncode:
        measured.failures.append(f"the programs for growth: exit status {beside.returncode}")
    return measured


def bench(*, rounds: int | None, again: bool, record: bool) -> int:
    """Measure, or read what was measured last; print; write the pages."""
    from tests.bench import report

    measured = kept() if again else measure((), rounds)
    if not measured.results:
        return finish(measured)
    rows = outcomes(measured, ROWS)
    print(tables.plain(tables.GOAL_HEAD, [tables.goal_row(row) for row in rows]))
    report.write(measured, rows)
    if record:
        write_record(outcomes(measured, guarded()[0]), measured)
    missed = sum(row.verdict == "missed" for row in rows)
    print(
        f"{len(rows)} goals, {missed} missed; the pages: docs/benchmarks.md, docs/benchmarks-all.md"
    )
    return finish(measured)


def some(only: Sequence[str], rounds: int | None, *, again: bool, part: bool) -> int:
    """Measure a part, and print its figures; write the pages with them if this is asked for."""
    measured = kept(only) if again else measure(only, rounds)
    names = list(dict.fromkeys(job for job, _ in measured.results))
    print(tables.plain(tables.FIGURES_HEAD, tables.figure_rows(measured.results, names)))
    rows = [row for row in outcomes(measured, ROWS) if row.value is not None]
    print(tables.plain(tables.GOAL_HEAD, [tables.goal_row(row) for row in rows]))
    if part and not measured.failures:
        from tests.bench import report

        whole = report.kept([*everything(), *jobs.growth()])
        # Of those that both know: over the fabric there is no guest, and so none of its packages.
        now = {
            name: measured.versions[name] for name in measured.versions if name in whole.versions
        }
        if other := check.differences(now, {name: whole.versions[name] for name in now}):
            measured.failures += [f"the page has other versions: {line}" for line in other]
        else:
            whole.versions |= measured.versions
            whole.results |= measured.results
            report.write(whole, outcomes(whole, ROWS))
    return finish(measured)


def guard(*, rounds: int, record: bool) -> int:
    """Measure the guarded rows and compare, or record them."""
    rows, needed = guarded()
    measured = Measured()
    raw = FOLDER / "check.jsonl"
    raw.unlink(missing_ok=True)
    machine.run(needed, measured, raw, rounds=rounds)
    found = outcomes(measured, rows)
    if record:
        write_record(found, measured)
    recorded = check.read()
    compared = check.compare(found, recorded)
    print(tables.plain(tables.CHECK_HEAD, [tables.check_row(row) for row in compared]))
    for line in check.differences(measured.versions, recorded.get("versions", {})):
        print(f"other versions than recorded, so that a change need not be aiordma's: {line}")
    failed = finish(measured)
    outside = [row for row in compared if not row.passed]
    if outside:
        print(f"{len(outside)} ratios are outside their bands.")
        if any("record it" in row.verdict for row in outside):
            print("To record them: make bench-check RECORD=1")
    return 1 if outside else failed


def write_record(rows: Sequence[goals.Outcome], measured: Measured) -> None:
    """Record the rows if all were measured."""
    try:
        check.write(rows, measured.versions)
    except ValueError as error:
        measured.failures.append(str(error))


def finish(measured: Measured) -> int:
    """Say what went wrong; returns the status."""
    for line in measured.failures:
        print(f"FAILED {line}")
    return 1 if measured.failures else 0


def main(words: Sequence[str] | None = None) -> int:
    """Run one of the two commands; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure aiordma beside programs in C.")
    parser.add_argument("--check", action="store_true", help="only the guarded rows, and compare")
    parser.add_argument("--record", action="store_true", help="write recorded.json")
    parser.add_argument("--rounds", type=int, help=f"[{jobs.ROUNDS}; {CHECK_ROUNDS} with --check]")
    parser.add_argument("--again", action="store_true", help="report the last run once more")
    parser.add_argument("--growth", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", nargs="*", metavar="TEXT", help="only jobs with one of these in their names"
    )
    parser.add_argument("--part", action="store_true", help="write the pages with this part new")
    options = parser.parse_args(words)
    FOLDER.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if options.check:
        status = guard(rounds=options.rounds or CHECK_ROUNDS, record=options.record)
    elif options.growth:
        return grow(options.only)
    elif options.only:
        status = some(options.only, options.rounds, again=options.again, part=options.part)
    else:
        status = bench(rounds=options.rounds, again=options.again, record=options.record)
    print(f"took {(time.monotonic() - began) / 60:.1f} minutes")
    return status


if __name__ == "__main__":
    sys.exit(main())
