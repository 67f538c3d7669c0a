"""The rows of the goals: what is measured, beside what, and what is to be reached.

The ordinary programs have theirs in plain.py.

A ratio is ours over theirs, of times or of bandwidths as the row says.  Both are medians of all
rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from tests.bench.jobs import LOOPS

#: The figures of one run of the bench: all rounds of each, by job and name.
Results = Mapping[tuple[str, str], list[float]]
PYVERBS = "pyverbs, event-driven"
CONNECTS = "connections a second, 100 at once"
CONNECTS_APIECE = "connections a second"
MEMORY = "Python memory per idle connection (KiB)"
MESSAGES = "cost per message at 1,000 connections"


@dataclass(frozen=True)
class Goal:
    """One row.

    Attributes:
        figure: What it is.
        beside: What it is compared with.
        ours: Job and name of the figure of aiordma.
        theirs: The same of the other; None if the figure stands alone.
        limit: What the ratio, or the figure that stands alone, has to reach; infinite if the
            row has no goal.
        better: "lower" or "higher".
        strict: Whether the limit itself is not enough.
        guarded: Whether `make bench-check` looks at it.
        less: Job and name of a bandwidth in MiB/s, whose nanoseconds a byte are taken off ours:
            what stands for an adapter is a program that uses the same processor.
    """

    figure: str
    beside: str
    ours: tuple[str, str]
    theirs: tuple[str, str] | None
    limit: float
    better: str = "lower"
    strict: bool = False
    guarded: bool = False
    less: tuple[str, str] | None = None

    @property
    def wanted(self) -> str:
        """The limit in words; empty if there is none."""
        if math.isinf(self.limit):
            return ""
        sign = "<" if self.better == "lower" else ">"
        return f"{sign if self.strict else sign + '='} {self.limit:g}"

    def reached(self, value: float) -> bool:
        """Whether the value is good enough."""
        if value == self.limit:
            return not self.strict
        return (value < self.limit) == (self.better == "lower")


@dataclass(frozen=True)
class Sample:
    """All rounds of one figure."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The one in the middle."""
        return statistics.median(self.values)

    def without(self, part: float) -> Sample:
        """Each value less a part of it."""
        return Sample(tuple(value - part for value in self.values))

    @property
    def spread(self) -> float:
        """From the least to the most, as a part of the median."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Outcome:
    """What came of a row; `ours` or `theirs` is None if there is no such figure."""

    goal: Goal
    ours: Sample | None
    theirs: Sample | None

    @property
    def value(self) -> float | None:
        """What is held against the limit."""
        if self.ours is None:
            return None
        if self.goal.theirs is None:
            return self.ours.median
        if self.theirs is None or not self.theirs.median:
            return None
        return self.ours.median / self.theirs.median

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.value is None:
            return "not measured"
        if not self.goal.wanted:
            return ""
        return "reached" if self.goal.reached(self.value) else "missed"


def sample(results: Results, where: tuple[str, str] | None) -> Sample | None:
    """All rounds of a figure, by job and name; None if there is none."""
    values = None if where is None else results.get(where)
    return Sample(tuple(values)) if values else None


def judge(goal: Goal, results: Results) -> Outcome:
    """Look a row up in the results."""
    ours = sample(results, goal.ours)
    if ours is not None and goal.less is not None:
        less = sample(results, goal.less)
        ours = None if less is None else ours.without(1e9 / 2**20 / less.median)
    return Outcome(goal, ours, sample(results, goal.theirs))


def _latencies() -> list[Goal]:
    """64 bytes: messages, callbacks, one-sided operations."""
    found = []
    send = ("ib_send_lat -e", "us")
    limits = {"uvloop": (1.25, 1.2), "asyncio": (2.2, 1.7)}
    for loop in LOOPS:
        awaited, called = limits[loop]
        found += [
            # The check looks at the echo of plain.py, which reads its messages.
            Goal(
                f"send/recv half round trip, 64 B, awaited, {loop}", "ib_send_lat -e",
                (f"aiordma send lat 64 connection {loop}", "us"), send, awaited,
            ),
            Goal(
                f"half round trip, 64 B, Protocol callbacks, {loop}", "ib_send_lat -e",
                (f"aiordma stream lat 64 protocol {loop}", "us"), send, called, guarded=True,
            ),
        ]  # fmt: skip
    # perftest has no events for WRITE.
    beside = {"read": ("ib_read_lat -e", "us"), "write": ("one_sided.c", "write, inline us")}
    for name, theirs in beside.items():
        found.append(
            Goal(
                f"RDMA {name.upper()}, 64 B, awaited, uvloop", theirs[0],
                (f"aiordma {name} lat 64 connection uvloop", "us"), theirs, 1.5, guarded=True,
            )
        )  # fmt: skip
    return found


def _bandwidths() -> list[Goal]:
    """64 KiB and 1 MiB, and the rate of 64 bytes."""
    found = []
    for name in "send", "write", "read":
        program = f"ib_{name}_bw" + ("" if name == "write" else " -e")
        for size, text in (65_536, "64 KiB"), (1 << 20, "1 MiB"):
            found.append(
                Goal(
                    f"{name.upper()} bandwidth, {text}", program,
                    (f"aiordma {name} bw {size} native uvloop", "MiB/s"),
                    (f"{program} {size}", "MiB/s"), 0.97, "higher",
                    guarded=size == 65_536,
                )
            )  # fmt: skip
    read = ("ib_read_bw -e 1048576", "MiB/s")
    # perftest makes no checksums: with them the row has no goal.
    for check, text, limit in ("unchecked", "", 0.97), ("checked", ", checked", math.inf):
        found.append(
            Goal(
                f"recv_into bandwidth, 64 MiB, numpy{text}", "ib_read_bw -e",
                (f"recv_into {check}", "MiB/s"), read, limit, "higher", guarded=not text,
            )
        )  # fmt: skip
    found.append(
        Goal(
            "message rate, 64 B, depth 128", "ib_send_bw -e",
            ("aiordma send rate 64 native uvloop", "Mpps"), ("ib_send_bw -e 64", "Mpps"), 0.5,
            "higher", guarded=True,
        )
    )  # fmt: skip
    return found


def _streams() -> list[Goal]:
    return [
        Goal(
            "stream bandwidth, 64 KiB, uvloop", "rstream, blocking",
            ("aiordma stream bw 65536 protocol uvloop", "MiB/s"), ("rstream 65536", "MiB/s"), 0.95,
            "higher", guarded=True,
        ),
        Goal(
            "stream half round trip, 64 B, uvloop", "rstream, blocking",
            ("aiordma stream lat 64 protocol uvloop", "us"), ("rstream 64", "us"), 1.4,
            guarded=True,
        ),
    ]  # fmt: skip


def _first() -> list[Goal]:
    return [
        Goal(
            "processor time up to the first connection, uvloop", "TCP",
            ("first", "RDMA s"), ("first", "TCP s"), 3.0, guarded=True,
        ),
        # By an idle machine's own clock: a goal in seconds is one of a real processor.
        Goal(
            "the same over the fabric, by this machine's clock, more than TCP", "",
            ("first, not counted", "more s"), None, 0.1,
        ),
    ]  # fmt: skip


def _growth() -> list[Goal]:
    return [
        Goal(
            CONNECTS, "cmtime", ("growth connect", f"{CONNECTS}, ours"),
            ("growth connect", f"{CONNECTS}, theirs"), 0.5, "higher",
        ),
        Goal(
            MESSAGES, "at 10 connections", ("growth messages", f"{MESSAGES}, ours"),
            ("growth messages", f"{MESSAGES}, theirs"), 1.3,
        ),
        Goal(MEMORY, "", ("growth memory", f"{MEMORY}, ours"), None, 16),
    ]  # fmt: skip


def _beside_pyverbs() -> list[Goal]:
    """The figures that the script has, too; on the loop that each was taken on."""
    found = []

    def add(figure: str, job: str, unit: str, theirs: str) -> None:
        better = "lower" if unit == "us" else "higher"
        against = ("pyverbs", f"event {theirs} {unit}")
        found.append(Goal(figure, PYVERBS, (job, unit), against, 1, better, strict=True))

    for loop in LOOPS:
        job = f"aiordma send lat 64 connection {loop}"
        add(f"send/recv half round trip, 64 B, awaited, {loop}", job, "us", "send")
        job = f"aiordma stream lat 64 protocol {loop}"
        add(f"half round trip, 64 B, Protocol callbacks, {loop}", job, "us", "send")
    for name in "read", "write":
        job = f"aiordma {name} lat 64 connection uvloop"
        add(f"RDMA {name.upper()}, 64 B, awaited, uvloop", job, "us", name)
    for name in "send", "write", "read":
        for size, text in (65_536, "64 KiB"), (1 << 20, "1 MiB"):
            job = f"aiordma {name} bw {size} native uvloop"
            add(f"{name.upper()} bandwidth, {text}", job, "MiB/s", f"{name} {size}")
    add("message rate, 64 B, depth 128", "aiordma send rate 64 native uvloop", "Mpps", "send 64")
    ours, theirs = ("growth connect", f"{CONNECTS}, ours"), ("pyverbs connect", CONNECTS_APIECE)
    found.append(Goal(CONNECTS, PYVERBS, ours, theirs, 1, "higher", strict=True))
    return found


GOALS: tuple[Goal, ...] = (
    *_latencies(),
    *_bandwidths(),
    *_streams(),
    *_first(),
    *_growth(),
    *_beside_pyverbs(),
)
