"""Latency and throughput over the size of a message, and throughput over the depth: once each.

Every point is a job of ours and one of the program that it stands beside, with new processes and a
new connection.  The curves are there to be looked at; what has a goal is in `jobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.bench import plain
from tests.bench.jobs import Job, perf, perftest, rstream

#: Each is four times the one before: the sizes of the goals are among them.
SIZES = tuple(4**n for n in range(12))
#: Of the echo: twice, up to the largest message that a connection takes by default.
ECHOED = tuple(2**n for n in range(27))
DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Of the messages of a sweep over the depth: a few packets, so that the program still shows.
DEPTH_SIZE = 4096
DEPTH_COUNT = 512
#: What perftest calls the tests, with events where there are some.
PROGRAMS = {"send": ("ib_send_bw", "-e"), "write": ("ib_write_bw",), "read": ("ib_read_bw", "-e")}


@dataclass(frozen=True)
class Sweep:
    """One curve of ours, and one of another program.

    Attributes:
        name: What is swept.
        over: "size" or "depth".
        unit: Of the figure.
        beside: The other program.
        points: Where it is measured.
        ours: The job of a point; its name does not matter.
        theirs: The same.
    """

    name: str
    over: str
    unit: str
    beside: str
    points: tuple[int, ...]
    ours: Callable[[int], Job]
    theirs: Callable[[int], Job]

    def job_name(self, who: str, point: int) -> str:
        """What the job of a point is called; `who` is "ours" or "theirs"."""
        return f"{self.name} over {self.over}, {who}, {point}"

    def jobs(self) -> list[Job]:
        """All of them."""
        return [
            replace(make(point), name=self.job_name(who, point), rounds=1)
            for point in self.points
            for who, make in (("ours", self.ours), ("theirs", self.theirs))
        ]


def _count(size: int) -> int:
    """Messages of a bandwidth, five at least for perftest; as many, up to 16, come before."""
    return 300 if size <= 4096 else 90 if size <= 262_144 else 8 if size <= 1 << 20 else 5


def _bandwidth(test: str) -> Sweep:
    program, *events = PROGRAMS[test]

    def theirs(size: int) -> Job:
        return perftest(program, *events, "-s", str(size), "-n", str(_count(size)))

    def ours(size: int) -> Job:
        return perf(test, "bw", size, "native", "uvloop", count=_count(size))

    return Sweep(test, "size", "MiB/s", " ".join(PROGRAMS[test]), SIZES, ours, theirs)


def _depth(test: str) -> Sweep:
    program, *events = PROGRAMS[test]
    size, count = DEPTH_SIZE, DEPTH_COUNT

    def theirs(depth: int) -> Job:
        many = ("-s", str(size), "-n", str(count), "-t", str(depth))
        return perftest(program, *events, *many)

    def ours(depth: int) -> Job:
        return perf(test, "bw", size, "native", "uvloop", "-t", str(depth), count=count)

    return Sweep(test, "depth", "MiB/s", " ".join(PROGRAMS[test]), DEPTHS, ours, theirs)


LATENCY = Sweep(
    "latency", "size", "us", "ib_send_lat -e", ECHOED,
    lambda size: plain.program("echo", size), plain.latency,
)  # fmt: skip
STREAM = Sweep(
    "stream", "size", "MiB/s", "rstream", SIZES,
    lambda size: perf("stream", "bw", size, "protocol", "uvloop", count=_count(size)),
    lambda size: rstream(size, _count(size), 1),
)  # fmt: skip
OVER_SIZE = (*(_bandwidth(test) for test in PROGRAMS), STREAM)
OVER_DEPTH = tuple(_depth(test) for test in PROGRAMS)
SWEEPS = (LATENCY, *OVER_SIZE, *OVER_DEPTH)


def jobs() -> list[Job]:
    """All points of all curves."""
    return [job for sweep in SWEEPS for job in sweep.jobs()]
