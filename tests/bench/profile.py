"""Where every instruction goes: `make profile`.

    python -m tests.bench.profile [TEXT...]   the programs with one of these in their names, or all
    --again                                   the tables once more, out of the last run
    --record                                  write them into docs/ (all programs)
    --top N                                   so many functions of each [15]

All programs run in one guest whose clock counts instructions, as in `make bench`, and a plugin of
QEMU counts each instruction by its address (instructions.c) from where a figure begins to where it
ends (marks.c).  Nothing is missed: the guest's clock says how many instructions there were, and the
table says how much of that the sum explains.

Because there is one CPU, both ends of a program, and the kernel between them, are counted together.
A mark costs one instruction; the functions that stand before those of a program in C cost some ten
a call.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench import machine, profile_limits, profile_tables, report
from tests.bench.jobs import PLUGIN
from tests.bench.profile_counts import Profile, read
from tests.bench.profile_jobs import CONNECTING, FLOORS, LARGE, MESSAGES, ROWS, Profiled
from tests.bench.tables import Row, markdown, plain, stacked

#: Counting makes the emulation about half as fast.
STALL_S = 2 * machine.STALL_S
LINES, COUNTS = (machine.FOLDER / f"profile.{kind}" for kind in ("jsonl", "counts"))


def measure(rows: Sequence[Profiled]) -> None:
    """Run the programs; what they tell, and what was counted, is kept in files.

    Raises:
        subprocess.CalledProcessError: A program in C cannot be made.
    """
    machine.compile_programs(("marks", "instructions", "floors", "connecting"))
    plan = LINES.with_suffix(".plan.json")
    plan.write_text(json.dumps([row.job.plan() | {"number": 0} for row in rows]))
    plugin = f"-plugin {shlex.quote(f'file={PLUGIN},out={COUNTS}')}"
    began = time.monotonic()
    with LINES.open("w") as kept:
        for line in machine.guest_lines(plan, STALL_S, "profile_guest", plugin):
            kept.write(json.dumps(line) + "\n")
            if "name" in line:
                text = f"{time.monotonic() - began:6.0f} s  {line['name']} {line['error']}"
                print(text.rstrip(), flush=True)


def tables(profiles: Sequence[Profile]) -> dict[str, tuple[Row, list[Row]]]:
    """Head and rows of each table, by its name, for programs that stand together."""
    made = {
        "layers": ("instructions", profile_tables.layer_rows),
        "calls": ("system calls", profile_tables.call_rows),
        "events": ("what else happens", profile_tables.event_rows),
    }
    return {
        name: (profile_tables.head(profiles, what), make(profiles))
        for name, (what, make) in made.items()
    }


def shown(profiles: Sequence[Profile], top: int) -> str:
    """Everything as plain text."""
    limits = profile_limits.rows(profiles)
    parts = [plain(profile_limits.HEAD, limits)] if limits else []
    for group in MESSAGES, LARGE, FLOORS, CONNECTING:
        some = [profile for profile in profiles if profile.row.group == group]
        if some:
            parts += [plain(head, rows) for head, rows in tables(some).values()]
        for profile in some:
            most: list[Row] = [
                (name, profile_tables.number(count))
                for name, count in profile_tables.top(profile, top)
            ]
            parts.append(plain((f"`{profile.row.row}`", f"for each {profile.row.unit}"), most))
    if rows := profile_limits.above_rows(profiles):
        parts.append(plain(profile_limits.above_head(profiles), rows))
        parts.append(profile_limits.above_text(profiles))
    return "\n\n".join(parts)


def write(profiles: Sequence[Profile], docs: Path = report.DOCS) -> None:
    """Write the tables into the pages.

    Raises:
        ValueError: A page has no place for one.
    """
    for page, group, kinds in (
        ("profile.md", MESSAGES, ("layers", "events", "functions")),
        ("profile.md", FLOORS, ("layers", "events")),
        ("profile.md", CONNECTING, ("layers", "calls", "events", "functions")),
        ("hot-path.md", MESSAGES, ("calls",)),
    ):
        some = [profile for profile in profiles if profile.row.group == group]
        texts = {name: stacked(head, rows) for name, (head, rows) in tables(some).items()}
        texts["functions"] = profile_tables.top_text(some)
        text = (docs / page).read_text()
        for kind in kinds:
            text = report.between(text, f"{group} {kind}", texts[kind], "profile")
        (docs / page).write_text(text)
    limits = markdown(
        profile_limits.PAGE_HEAD,
        [profile_limits.page_row(row) for row in profile_limits.rows(profiles)],
    )
    rows = profile_limits.above_rows(profiles)
    for name, new in (
        ("limits", limits),
        ("above layers", stacked(profile_limits.above_head(profiles), rows)),
        ("above functions", profile_limits.above_text(profiles)),
    ):
        path = docs / "profile.md"
        path.write_text(report.between(path.read_text(), name, new, "profile"))


def main(words: Sequence[str] | None = None) -> int:
    """Profile; the exit status is 1 if a program could not be."""
    parser = argparse.ArgumentParser(description="Count every instruction of a program's window.")
    parser.add_argument("only", nargs="*", metavar="TEXT", help="programs with this in their names")
    parser.add_argument("--again", action="store_true", help="report the last run once more")
    parser.add_argument("--record", action="store_true", help="write the tables into docs/")
    parser.add_argument("--top", type=int, default=profile_tables.TOP, help="functions of each")
    options = parser.parse_args(words)
    if options.record and options.only:
        parser.error("--record needs all programs")
    rows = [row for row in ROWS if not options.only or any(x in row.row for x in options.only)]
    if not rows:
        parser.error(f"there are only: {', '.join(row.row for row in ROWS)}")
    if not options.again:
        measure(rows)
    found = list(read(LINES, COUNTS, ROWS))
    profiles = [one for one in found if isinstance(one, Profile) and one.row in rows]
    failures = [one for one in found if isinstance(one, str)]
    complete = not failures and len(profiles) == len(rows)
    if options.record and complete:
        write(profiles)
    print(shown(profiles, options.top))
    for failure in failures:
        print(f"FAILED {failure}")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
