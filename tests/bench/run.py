"""`make bench` and `make bench-check`.

    python -m tests.bench.run            measure everything, print the goals, write docs/benchmarks*
    python -m tests.bench.run --check    the guarded rows against tests/bench/recorded.json
    --record                             with either: write that file

All of it runs on one emulated CPU whose clock counts instructions: see machine.py.  The status is 1
if something could not be measured, or if a checked ratio is outside its band; a goal that is missed
is a row that says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.bench import check, goals, jobs, machine, tables
from tests.bench.machine import FOLDER, Measured

#: The check takes the middle of so many rounds.
CHECK_ROUNDS = 3
GROWTH_STALL_S = 1500.0


def everything() -> list[jobs.Job]:
    """All that one guest does."""
    return [*jobs.ours(), *jobs.programs(), *jobs.SPINNING, *jobs.curves()]


def outcomes(measured: Measured, rows: Sequence[goals.Goal]) -> list[goals.Outcome]:
    """The rows out of what was measured."""
    return [goals.judge(goal, measured.results) for goal in rows]


def guarded() -> tuple[list[goals.Goal], list[jobs.Job]]:
    """The rows of the check, and the jobs that they need."""
    rows = [goal for goal in goals.GOALS if goal.guarded]
    needed = {where[0] for goal in rows for where in (goal.ours, goal.theirs) if where is not None}
    return rows, [job for job in (*jobs.ours(), *jobs.programs()) if job.name in needed]


def bench(*, rounds: int | None, again: bool, record: bool) -> int:
    """Measure, or read what was measured last; print; write the page."""
    from tests.bench import report

    main, growth = FOLDER / "bench.jsonl", FOLDER / "growth.jsonl"
    if again:
        measured = machine.read(main, everything())
        more = machine.read(growth, jobs.growth())
        measured.results |= more.results
        measured.failures += more.failures
    else:
        for raw in main, growth:
            raw.unlink(missing_ok=True)
        measured = Measured()
        machine.run(everything(), measured, main, rounds=rounds)
        # One boot each: 1,000 connections leave traces in the kernel.
        for job in jobs.growth():
            machine.run([job], measured, growth, stall_s=GROWTH_STALL_S)
    rows = outcomes(measured, goals.GOALS)
    print(tables.plain(tables.GOAL_HEAD, [tables.goal_row(row) for row in rows]))
    report.write(measured, rows)
    if record:
        write_record([row for row in rows if row.goal.guarded], measured)
    missed = sum(row.verdict == "missed" for row in rows)
    print(f"{len(rows)} goals, {missed} missed; the page: docs/benchmarks.md")
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
    options = parser.parse_args(words)
    FOLDER.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if options.check:
        status = guard(rounds=options.rounds or CHECK_ROUNDS, record=options.record)
    else:
        status = bench(rounds=options.rounds, again=options.again, record=options.record)
    print(f"took {(time.monotonic() - began) / 60:.1f} minutes")
    return status


if __name__ == "__main__":
    sys.exit(main())
