"""Reads what a profile has left: counts by address, and whose the addresses are."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench import symbols
from tests.bench.profile_jobs import Profiled
from tests.bench.symbols import KERNEL, Place

#: Of the emulated machine: `-icount shift=1`.
NS_PER_INSTRUCTION = 2
#: What has happened each time that one of these functions was entered: of the kernel, and of a
#: Python that has all its names.
EVENTS = {
    "__switch_to_asm": "switch to another process",
    "asm_exc_page_fault": "page fault",
    "_PyFrame_Clear": "call of a function in Python",
    "_PyObject_Malloc": "piece of memory from Python's allocator",
    "gc_collect_main": "run of Python's collector",
}
_CALLS = "__x64_sys_"
_WORDS = struct.Struct("<QQ")
_UPPER_HALF = 1 << 63


@dataclass(frozen=True)
class Profile:
    """A program's window.

    Attributes:
        row: What ran.
        ns: What the guest's clock says that it took.
        counts: Instructions of both ends and of the kernel, by function.
        calls: System calls of both ends together.
        events: `EVENTS`, of both ends.
    """

    row: Profiled
    ns: int
    counts: Counter[Place] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

    @property
    def instructions(self) -> int:
        """All of them."""
        return self.counts.total()

    @property
    def closure(self) -> float:
        """Counted time that the instructions explain: 1 is all of it; less if the machine slept."""
        return self.instructions * NS_PER_INSTRUCTION / self.ns


def windows(data: bytes) -> list[list[tuple[int, int]]]:
    """The last window of each program: addresses and counts; see instructions.c.

    Raises:
        ValueError: This is something else.
    """
    found: list[list[tuple[int, int]]] = []
    at = 0
    while at < len(data):
        kind, number = _WORDS.unpack_from(data, at)
        at += _WORDS.size
        end = at + number * _WORDS.size
        if kind == ord("J"):
            found.append([])
        elif kind == ord("S") and found and end <= len(data):
            found[-1] = [(address, count) for address, count in _WORDS.iter_unpack(data[at:end])]
        else:
            msg = f"byte {at - _WORDS.size} of the counts is no beginning of a block"
            raise ValueError(msg)
        at = end
    return found


def attribute(
    row: Profiled, told: str, kernel: symbols.Table, counts: Sequence[tuple[int, int]]
) -> Profile:
    """Name the functions.

    Args:
        row: What ran.
        told: What marks.c wrote: nanoseconds, and the maps of the process.
        kernel: Its functions.
        counts: By address.
    """
    ns, _, maps = told.partition("\n")
    profile, process = Profile(row, int(ns)), symbols.Maps(maps)
    nobody = Place(KERNEL, "?", 0)
    for address, count in counts:
        of_kernel = address >= _UPPER_HALF
        place = (kernel.find(address) or nobody) if of_kernel else process.find(address)
        profile.counts[place] += count
        if address != place.begin:
            continue
        if place.function in EVENTS:
            profile.events[EVENTS[place.function]] += count
        elif of_kernel and place.function.startswith(_CALLS):
            profile.calls[place.function.removeprefix(_CALLS)] += count
    return profile


def read(lines: Path, counts: Path, rows: Sequence[Profiled]) -> Iterator[Profile | str]:
    """What was measured of each program that ran, or what went wrong with it.

    Args:
        lines: What the guest has told.
        counts: What QEMU has written.
        rows: All programs there are.
    """
    by_name = {row.row: row for row in rows}
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    ran = [line for line in told if "name" in line]
    found = windows(counts.read_bytes())
    text = next((line["symbols"] for line in told if "symbols" in line), None)
    if text is None:
        yield "the guest ended before its last program"
        return
    kernel = symbols.kernel(zlib.decompress(base64.b64decode(text)).decode())
    for line, window in zip(ran, found, strict=True):
        if line["error"] or not line["window"]:
            said = [line[role][-300:] for role in ("client", "server") if line.get(role)]
            yield ": ".join((line["name"], line["error"] or "no window", *said))
        else:
            yield attribute(by_name[line["name"]], line["window"], kernel, window)
