"""The bytes that the processor moves for each byte of a large message: `make bench-check` ends so.

    python -m tests.bench.moved [--record]

A plugin of QEMU's counts each load and store of a guest, and its bytes (accesses.c), while messages
of 64 MiB go into an array of the program (into_peer.py): of the programs at both ends, and of the
kernel, in which Soft-RoCE is the adapter.  The last row is a program that copies each message by
itself: it shows that the count sees a copy.  `--record` writes the table into
docs/benchmarks-all.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench import machine, report
from tests.bench.into_peer import COUNT, SIZE
from tests.bench.jobs import ACCESSES, Job
from tests.bench.tables import Row, markdown, plain

#: Each access calls a function of the plugin.
STALL_S = 4 * machine.STALL_S
COUNTS = machine.FOLDER / "moved.counts"
HEAD = (
    "messages of 64 MiB", "loaded", "stored", "loaded by the kernel", "stored by the kernel",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How the messages arrive.

    Attributes:
        check: The word of into_peer.py.
        text: What a table calls it.
        loaded: Bytes that the programs at both ends load for each byte, at least and at most.
        stored: Likewise.
    """

    check: str
    text: str
    loaded: tuple[float, float]
    stored: tuple[float, float]


#: What is no byte of a message: objects of Python, requests, completions.
_REST = 0.15
WAYS = (
    Way("unchecked", "`recv_into`", (0, _REST), (0, _REST)),
    Way("checked", "`recv_into`, checked: a sum at each end", (2, 2 + _REST), (0, _REST)),
    Way("copied", "`recv`, and a copy by the program", (1, 1 + _REST), (1, 1 + _REST)),
)


@dataclass(frozen=True)
class Moved:
    """Bytes that were moved for each byte of the messages."""

    way: Way
    loaded: float
    stored: float
    kernel_loaded: float
    kernel_stored: float

    @property
    def faults(self) -> Iterator[str]:
        """A line for each count that is out of its limits."""
        for name, value, (least, most) in (
            ("loaded", self.loaded, self.way.loaded),
            ("stored", self.stored, self.way.stored),
        ):
            if not least <= value <= most:
                text = f"{self.way.text}: {value:.3f} bytes {name} a byte of the message"
                yield f"{text}, not {least:g} to {most:g}"

    @property
    def row(self) -> Row:
        """Of the table."""
        values = (self.loaded, self.stored, self.kernel_loaded, self.kernel_stored)
        return (self.way.text, *(f"{value:.3f}" for value in values))


def _job(way: Way) -> Job:
    client, server = (
        ("python:tests.bench.profiled", "into", role, "{address}", "{port}", way.check)
        for role in ("client", "server")
    )
    return Job(way.text, "numbers", client, server)


def parse(text: str) -> list[Moved]:
    """The counts of all ways, from what accesses.c has written.

    Raises:
        ValueError: It has not one window for each.
    """
    windows = [line for line in text.splitlines() if line]
    if len(windows) != len(WAYS):
        msg = f"{len(windows)} programs were counted, of {len(WAYS)}"
        raise ValueError(msg)
    return [
        Moved(way, *(int(word) / (COUNT * SIZE) for word in line.split()))
        for way, line in zip(WAYS, windows, strict=True)
    ]


def measure() -> list[Moved]:
    """Run the programs.

    Raises:
        subprocess.CalledProcessError: A program in C cannot be made.
        RuntimeError: A program has failed.
        ValueError: It was not counted.
    """
    machine.compile_programs(("marks", "accesses"))
    COUNTS.unlink(missing_ok=True)  # the counts of an earlier run are no counts of this one
    plan = COUNTS.with_suffix(".plan.json")
    plan.write_text(json.dumps([_job(way).plan() | {"number": 0} for way in WAYS]))
    plugin = f"-plugin {shlex.quote(f'file={ACCESSES},out={COUNTS}')}"
    for line in machine.guest_lines(plan, STALL_S, "profile_guest", plugin):
        if line.get("error"):
            msg = f"{line['name']}: {line['error']}"
            raise RuntimeError(msg)
    return parse(COUNTS.read_text())


def write(found: Sequence[Moved], docs: Path = report.DOCS) -> None:
    """Write the table into the page.

    Raises:
        ValueError: The page has no place for it.
    """
    page = docs / "benchmarks-all.md"
    table = markdown(HEAD, [each.row for each in found])
    page.write_text(report.between(page.read_text(), "bytes", table, "moved"))


def main(words: Sequence[str] | None = None) -> int:
    """Count; the exit status is 1 if bytes are moved that need not be."""
    parser = argparse.ArgumentParser(description="Count the bytes that the processor moves.")
    parser.add_argument("--record", action="store_true", help="write the table into docs/")
    options = parser.parse_args(words)
    found = measure()
    print(plain(HEAD, [each.row for each in found]))
    faults = [fault for each in found for fault in each.faults]
    for fault in faults:
        print(f"FAILED {fault}")
    if options.record and not faults:
        write(found)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
