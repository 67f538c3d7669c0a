"""Which programs are profiled, and what their counts are divided by."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.bench import jobs
from tests.bench.jobs import GID, LOOPS, MARKS, Job
from tests.bench.plain_peer import trips
from tests.bench.plain_streams import PIECES

#: What is divided by.
HALF, PAIR = "half round trip", "connected pair"
#: Which stand in one table.
MESSAGES, LARGE, FLOORS, CONNECTING = "messages", "large", "floors", "connecting"
TRIPS = 500
CONNECTIONS = 100
#: Bytes of large messages.
SIZES = (65_536, 262_144, 1 << 20)
#: Bytes of an array of Dask, and how many plain_dask.py sends of them.
ARRAY, ARRAYS = 16 << 20, 2
#: Completions of ib_send_lat before its window; it has one for each message, sent or received.
SKIPPED = 200
_PYVERBS_TRIPS, _PYVERBS_CONNECTIONS = 300, 20


@dataclass(frozen=True)
class Profiled:
    """A program.

    Attributes:
        row: What it is called here.
        job: What runs.
        unit: Of what there are many in the window.
        number: How many.
        group: Which it stands among.
    """

    row: str
    job: Job
    unit: str
    number: int
    group: str


def _watched(start: str, stop: str, *command: str) -> tuple[str, ...]:
    """The command with marks.c before it; a window from one call to another."""
    return ("env", f"LD_PRELOAD={MARKS}", f"BENCH_START={start}", f"BENCH_STOP={stop}", *command)


def _ib_send_lat() -> Profiled:
    count = ("-n", str(TRIPS + SKIPPED))
    words = ("ib_send_lat", "-e", "-s", "64", *count, "-F", "-x", GID, "-p", "{port}")
    number = 2 * TRIPS
    call = "ibv_get_cq_event"
    client = _watched(f"{call}:{SKIPPED}", f"{call}:{SKIPPED + number}", *words, "{address}")
    job = Job("ib_send_lat -e", "perftest_lat", client, words, "tcp")
    return Profiled(job.name, job, HALF, number, MESSAGES)


def _cmtime() -> Profiled:
    words = ("cmtime", "-p", "{port}")
    more = ("-s", "{address}", "-c", str(CONNECTIONS))
    client = _watched("rdma_create_id:1", "rdma_disconnect:1", *words, *more)
    job = Job("cmtime", "text", client, (*words, "-b", "{address}"), endless=True)
    return Profiled(job.name, job, PAIR, CONNECTIONS, CONNECTING)


def _connecting(many: int = CONNECTIONS, way: str = "only") -> Profiled:
    job = jobs.connecting(many, way)
    client = _watched("rdma_create_id:1", "rdma_disconnect:1", *job.client)
    return Profiled(job.name, replace(job, client=client), PAIR, many, CONNECTING)


def _perf(name: str, test: str, api: str, loop: str) -> Profiled:
    program = ("python:tests.bench.profiled", "perf")
    words = ("-p", "{port}", "-s", "64", "-n", str(TRIPS), "-W", "100", "--api", api)
    more = ("--loop", loop, "--json", "-", "--timeout", "3000")
    client = (*program, test, "lat", "{address}", *words, *more)
    server = (*program, "--server", "--host", "{address}", "-p", "{port}", "--loop", loop)
    return Profiled(name, Job(name, "perf", client, server), HALF, 2 * TRIPS, MESSAGES)


def _connect(loop: str) -> Profiled:
    client, server = (
        ("python:tests.bench.profiled", "connect", role, "{address}", "{port}", loop)
        for role in ("client", "server")
    )
    name = f"connect {loop}"
    return Profiled(name, Job(name, "text", client, server), PAIR, CONNECTIONS, CONNECTING)


def _floor(way: str, loop: str) -> Profiled:
    job = jobs.floor(way, loop, jobs.TIMERS[0])
    name = way if way == jobs.WAYS[0] else f"{way} {loop}"
    return Profiled(name, replace(job, name=name), HALF, 2 * jobs.TRIPS, FLOORS)


def _plain(
    module: str,
    form: str,
    size: int,
    number: int,
    unit: str,
    over: str = "rdma",
    group: str = LARGE,
) -> Profiled:
    """A program of plain_peer.py, plain_streams.py, plain_dask.py or plain_many.py."""
    program = "python:tests.bench.profiled"
    client, server = (
        (program, "plain", module, role, form, str(size), LOOPS[0], over, "{address}", "{port}")
        for role in ("client", "server")
    )
    name = f"{form} {size}" + (" TCP" if over == "tcp" else "")
    job = Job(name, "text", client, server, listens=over)
    return Profiled(job.name, job, unit, number, group)


def _ordinary(form: str) -> tuple[Profiled, Profiled]:
    """The connects of an ordinary program, and C whose connections have the same memory."""
    many = max(jobs.IDLE)
    ours = _plain("many", form, many, many, PAIR, group=CONNECTING)
    return ours, _connecting(many, jobs.SAME_SIZES[form])


def _large_messages(size: int) -> tuple[Profiled, Profiled]:
    """The README's echo, and ib_send_lat; each completion of the latter is an event."""
    count, first = trips(size), 10
    words = (
        *("ib_send_lat", "-e", "-s", str(size), "-n", str(count + first // 2)),
        *("-F", "-x", GID, "-p", "{port}"),
    )
    call = "ibv_get_cq_event"
    client = _watched(f"{call}:{first}", f"{call}:{first + 2 * count}", *words, "{address}")
    job = Job(f"ib_send_lat -e {size}", "perftest_lat", client, words, "tcp")
    echo = _plain("peer", "echo", size, 2 * count, HALF)
    return echo, Profiled(job.name, job, HALF, 2 * count, LARGE)


def _pyverbs(what: str, group: str, unit: str, number: int) -> Profiled:
    program = ("/usr/bin/python3", "-m", "tests.bench.profile_pyverbs", what)
    client, server = ((*program, role, "{address}", "{port}") for role in ("client", "server"))
    name = f"pyverbs {what}"
    return Profiled(name, Job(name, "text", client, server), unit, number, group)


ROWS: tuple[Profiled, ...] = (
    _ib_send_lat(),
    *(_perf(f"send {loop}", "send", "connection", loop) for loop in LOOPS),
    *(_perf(f"protocol {loop}", "stream", "protocol", loop) for loop in LOOPS),
    _pyverbs("exchange", MESSAGES, HALF, 2 * _PYVERBS_TRIPS),
    _floor("pump", LOOPS[0]),
    *(_floor(way, loop) for loop in LOOPS for way in ("callback", "resume")),
    *(row for size in SIZES for row in _large_messages(size)),
    _plain("streams", "pieces", 65_536, PIECES, "piece"),
    *(_plain("dask", "dask-array", ARRAY, ARRAYS, "array", over) for over in ("rdma", "tcp")),
    _cmtime(),
    _connecting(),
    _connect("uvloop"),
    *(row for form in jobs.SAME_SIZES for row in _ordinary(form)),
    _pyverbs("connect", CONNECTING, PAIR, _PYVERBS_CONNECTIONS),
)
