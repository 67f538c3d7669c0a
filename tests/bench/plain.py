"""The ordinary programs: which of them run, and the rows of their table.

They are written as a user writes them: default settings, documented calls, every message read.
What a row stands beside is a program in C, the same program over TCP, or the same in another way.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tests.bench.goals import PYVERBS, Goal
from tests.bench.jobs import (
    ASKED,
    COUNTS,
    IDLE,
    LOOPS,
    SAME_SIZES,
    Job,
    cmtime,
    connecting,
    perftest,
)
from tests.bench.plain_peer import trips

#: Bytes of the echoes, and what half a round trip may take beside ib_send_lat -e.
ECHOES = {64: 1.25, 4096: 1.15, 16_384: 1.35, 65_536: 1.25, 262_144: 1.15, 1 << 20: 1.05}
SMALL, LARGE = 64, 65_536
CALLERS = (1, 100, 1000)
#: Callers of requests, and what one takes beside the same calls by hand over TCP.
REQUESTERS = {1: 0.8, 16: 0.65, 100: 0.65}
#: Those of them that are measured by hand, too, with a task of the server for each call.
MANY_REQUESTERS = (16, 100)
#: Forms of plain_peer.py that have a row over TCP, too; a form, and its number.
BESIDE_TCP = (
    ("one-way", SMALL),
    *(("callers", number) for number in CALLERS),
    ("echo", SMALL),
    ("echo", LARGE),
)
#: Those of plain_streams.py.
STREAMS = (("lines", SMALL), ("blocks", LARGE), ("pieces", LARGE))
#: Those of plain_dask.py, and what they may take beside TCP; None where the device decides.
DASK = {
    ("dask-message", SMALL): 1.0,
    ("dask-array", 1 << 20): None,
    ("dask-array", 16 << 20): None,
    ("dask-array", 256 << 20): None,
}
#: The array with most rows.
ARRAY = ("dask-array", 16 << 20)
#: Name of the figure of its processor time, of both processes.
PROCESSES = "processes ns/B"
#: The other device, which has a row of some programs, too: software iWARP.
IWARP = "siw"
#: Those of Dask.
DASK_IWARP = (("dask-message", SMALL), ARRAY)
#: READ and WRITE, of plain_one_sided.py.
ONE_SIDED = ("one-sided", SMALL)
#: Memory of a READ or WRITE, and what it may take beside C.
MEMORY = {"bytearray": 1.4, "region": 1.25, "view": 1.25, "piece": math.inf}
#: What an atomic may take beside ib_atomic_lat -e.
ATOMIC = 1.25
ATOMICS = ("fetch_add", "compare_swap")
#: Messages of plain_buffers.py, and what they may take beside `send(bytes)` and `bytes(recv())`.
BUFFERS, OUTGOING = "buffers", "outgoing"
BUFFER_SIZES = (SMALL, 4096)
WAYS = {
    "recv_into, bytearray": ("into bytearray us", 1.1),
    "recv_into, memoryview": ("into memoryview us", 1.1),
    "recv_into, ndarray": ("into ndarray us", 1.1),
    "send, memoryview": ("of memoryview us", 1.08),
    "send, ndarray": ("of ndarray us", 1.08),
}
#: The same of messages one way.
KINDS = {"memoryview": 1.08, "ndarray": 1.08}
#: Bytes of the noted writes of plain_notes.py, and what each may take beside a message, of which
#: the peer's adapter has not told yet that it has arrived.  In C, with events, a WRITE with a SEND
#: behind it takes 22 us more than a SEND in half a round trip on Soft-RoCE, where each packet is
#: the processor's work: 64.6 us beside 42.4 with 64 B, and 76.0 beside 53.3 with 4 KiB.
NOTED = {("notes", SMALL): 1.15, ("notes", 4096): 1.15}
#: The other package for connections over TCP; what it does has a row on uvloop's loop.
FASTNET = "aiofastnet"
#: The package for messages over TCP, pyzmq.
ZMQ = "zmq"
#: What plain_requests.py has over TCP: the name of each, its loop, and how many times its requests
#: a second the library's are to be.  grpc.aio has a poller of its own, and runs on asyncio's loop.
ASKING = {
    "grpc": ("grpc.aio", "asyncio", 4.0),
    "aiohttp": ("aiohttp", "uvloop", 4.0),
    "dealer": ("pyzmq, DEALER and ROUTER", "uvloop", 2.0),
}
#: Tasks that ask, and those that ask by a pool.
ASKERS, POOL_ASKERS = 100, 16
MAIN = LOOPS[0]
IBVERBS, POLLED = "ibverbs of PyPI, event-driven", "ibverbs of PyPI, polling"
#: Forms of plain_many.py and plain_death.py.
MANY = ("connects", "pool", "memory", "streams", "idle")
FAN_OUT = "fan-out"
#: Connections that a message is sent over.
FANNED = 20
DEATHS = ("deaths", "events")
#: Those of plain_verbs.py, and their rows in docs/costs.md.
VERBS = {
    "awaited": "`QueuePair.send` and `recv`, awaited, 64 B",
    "posted": "the same by `post_send`, `post_recv` and `anext(cq)`",
    "prepared": "the same by `prepare_send`, `prepare_recv` and `anext(cq)`",
}
#: Those of plain_requests.py.
ASKS = ("ask", "pooled", "timed-requests")
#: Connections of these: at once, and idle.
AT_ONCE = IDLE[-1]
#: Connections whose memory is measured.  The heap grows by pieces of 1 MiB, and has room in the
#: beginning: of 50 connections, one takes 115 to 136 KiB by chance.
HELD = 300
#: Peers that are killed.
KILLED = 100


def name(form: str, number: int, loop: str = MAIN, over: str = "rdma", device: str = "rxe") -> str:
    """What a job is called; `over` is "rdma", "tcp", "handed", `FASTNET`, `ZMQ` or of `ASKING`."""
    words = {"rdma": "", "tcp": " TCP", "handed": " no wire", FASTNET: f" {FASTNET}", ZMQ: " pyzmq"}
    words |= {each: f" {each}" for each in ASKING}
    end = "" if device == "rxe" else f" {device}"
    return f"plain {form} {number} {loop}{words[over]}{end}"


def program(
    form: str, number: int, loop: str = MAIN, over: str = "rdma", device: str = "rxe"
) -> Job:
    """One of the programs."""
    files = {ONE_SIDED[0]: "one_sided"} | dict.fromkeys(dict(STREAMS), "streams")
    files |= dict.fromkeys((*MANY, FAN_OUT), "many") | dict.fromkeys(DEATHS, "death")
    files |= {form: "dask" for form, _ in DASK} | dict.fromkeys((BUFFERS, OUTGOING), "buffers")
    files |= dict.fromkeys(VERBS, "verbs") | dict.fromkeys(ASKS, "requests")
    files |= {form: "notes" for form, _ in NOTED}
    module = f"python:tests.bench.plain_{files.get(form, 'peer')}"
    client, server = (
        (module, role, form, str(number), loop, over, "{address}", "{port}")
        for role in ("client", "server")
    )
    listens = "rdma" if over == "rdma" else "tcp"
    called = name(form, number, loop, over, device)
    job = Job(called, "numbers", client, server, listens, device=device)
    return replace(job, endless=over == ZMQ or form in ASKS)


#: The rows of docs/costs.md: the call; job and figure of its time in microseconds.
COSTS: tuple[tuple[str, str, str], ...] = (
    ("`send` and `recv`, 64 B", name("echo", SMALL), "us"),
    ("the same, 4 KiB", name("echo", 4096), "us"),
    ("the same, 64 KiB", name("echo", LARGE), "us"),
    ("the same, 1 MiB", name("echo", 1 << 20), "us"),
    ("`send`, 64 B, one way", name("one-way", SMALL), "us"),
    ("`send` of a memoryview and `recv`, 64 B", name(BUFFERS, SMALL), "of memoryview us"),
    ("`send` and `recv_into`, 64 B", name(BUFFERS, SMALL), "into bytearray us"),
    ("a line of 64 B over a stream", name("lines", SMALL), "us"),
    ("`request` of 56 B, one caller", name("requests", 1), "us"),
    ("the same, 16 callers, a call", name("requests", 16), "us"),
    ("the same, 100 callers, a call", name("requests", 100), "us"),
    ("`Pool.request` of 200 B, 16 callers, a call", name(ASKS[1], POOL_ASKERS), "us"),
    ("`read` of 64 B into a bytearray", name(*ONE_SIDED), "read bytearray us"),
    ("`read` of 64 B into a region", name(*ONE_SIDED), "read region us"),
    ("`write` of 64 B of a bytearray", name(*ONE_SIDED), "write bytearray us"),
    ("`read` of 64 B in a batch of 1,000", name(*ONE_SIDED), "batch, read bytes us"),
    ("`write` of 64 B in a batch of 1,000", name(*ONE_SIDED), "batch, write bytes us"),
    ("`fetch_add`", name(*ONE_SIDED), "fetch_add us"),
    ("`compare_swap`", name(*ONE_SIDED), "compare_swap us"),
    ("`write(imm=)` of 64 B and `recv`", name("notes", SMALL), "number us"),
    ("the same, and `Lease.notes`", name("notes", SMALL), "note us"),
    ("`Broadcast.send` of 1 KiB to 20", name(FAN_OUT, FANNED), "together us"),
    ("`connect` and `accept`, 50 at once, a pair", name("connects", AT_ONCE), "us"),
    *((call, name(form, SMALL), "us") for form, call in VERBS.items()),
)


def latency_name(size: int) -> str:
    """What the job of ib_send_lat is called; that of 64 bytes is one of `jobs.programs`."""
    return "ib_send_lat -e" + (f" {size}" if size != SMALL else "")


def latency(size: int) -> Job:
    """ib_send_lat with as many messages as the echo of this size."""
    words = ("-e", "-s", str(size), "-n", str(trips(size)))
    return perftest("ib_send_lat", *words, name=latency_name(size))


def listed() -> Job:
    """ib_send_bw with sixteen messages a doorbell, as many as the library posts at most."""
    words = ("ib_send_bw", "-e", "-l", "16", "-s", str(SMALL), "-n", str(COUNTS[SMALL]))
    return perftest(*words, name=f"ib_send_bw -e -l 16 {SMALL}")


def listed_reads() -> Job:
    """ib_read_bw with sixteen READs a doorbell; a batch has half of `one_sided_depth`, eight."""
    words = ("ib_read_bw", "-e", "-l", "16", "-s", str(SMALL), "-n", str(COUNTS[SMALL]))
    return perftest(*words, name=f"ib_read_bw -e -l 16 {SMALL}")


def ibverbs() -> Job:
    """A script with the package `ibverbs`; see ibverbs_peer.py."""
    client, server = (
        ("python:tests.bench.ibverbs_peer", role, "{address}", "{port}")
        for role in ("client", "server")
    )
    return Job("ibverbs", "numbers", client, server, "tcp")


def many() -> list[Job]:
    """Many connections at once: connecting, and idle; and what stands beside them."""
    connects, pool, memory, streams, _ = MANY
    once = [replace(program(form, HELD), rounds=1) for form in (memory, streams)]
    ours = [program(connects, AT_ONCE), program(pool, AT_ONCE), program(FAN_OUT, FANNED)]
    return [
        *ours,
        cmtime(AT_ONCE),
        *(connecting(AT_ONCE, way) for way in SAME_SIZES.values()),
        *once,
        *idle(),
    ]


def idle() -> list[Job]:
    """Connections that do nothing, of the library and in C."""
    ours = (program(MANY[-1], number, loop) for number in IDLE for loop in LOOPS)
    theirs = (connecting(AT_ONCE, way) for way in ASKED)
    return [*(replace(job, rounds=1) for job in ours), *(replace(job, rounds=3) for job in theirs)]


def dask() -> list[Job]:
    """Comms of distributed, which takes a while to import."""
    both = ("rdma", "tcp")
    return [
        *(program(*which, over=over) for which in DASK for over in both),
        *(program(*which, over=over, device=IWARP) for which in DASK_IWARP for over in both),
    ]


def deaths() -> list[Job]:
    """Peers that are killed; on both loops, beside the kernel's own event."""
    loops = {"deaths": LOOPS, "events": (MAIN,)}
    return [
        replace(program(form, KILLED, loop), rounds=1) for form in DEATHS for loop in loops[form]
    ]


def asks() -> list[Job]:
    """Requests beside other packages, and by a pool."""
    ask, *by = ASKS
    return [
        program(ask, ASKERS),
        *(program(ask, ASKERS, loop, over) for over, (_, loop, _) in ASKING.items()),
        *(program(form, POOL_ASKERS) for form in by),
    ]


def jobs() -> list[Job]:
    """All of them, and the programs that stand beside them."""
    sizes = [size for size in ECHOES if ("echo", size) not in BESIDE_TCP]
    return [
        *(
            program(form, number, loop, over)
            for form, number in (*BESIDE_TCP, *STREAMS)
            for loop in LOOPS
            for over in ("rdma", "tcp")
        ),
        *(program(form, number, over=FASTNET) for form, number in STREAMS[:2]),
        *(program(form, SMALL) for form in ("timeout", "untimed")),
        *(program("echo", size) for size in sizes),
        *(program("echo", size, over=ZMQ) for size in (SMALL, LARGE)),
        *(replace(job, rounds=3) for job in dask()),
        *(program("callers", number, over="handed") for number in CALLERS),
        *(program("requests", number) for number in (*REQUESTERS, CALLERS[-1])),
        *(program("tasked", number) for number in MANY_REQUESTERS),
        program("requests", 1, "asyncio"),
        program("callers", 16, over="tcp"),
        program(*ONE_SIDED),
        *(program(BUFFERS, size) for size in BUFFER_SIZES),
        program(OUTGOING, SMALL),
        *(program(form, SMALL) for form in VERBS),
        *asks(),
        *(program(*which) for which in NOTED),
        *many(),
        *deaths(),
        *(latency(size) for size in ECHOES if size != SMALL),
        listed(),
        listed_reads(),
        ibverbs(),
    ]


def title(size: int) -> str:
    """A size in words."""
    for unit, many in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= many:
            return f"{size // many} {unit}"
    return f"{size} B"


def _row(
    figure: str,
    beside: str,
    ours: str,
    theirs: str,
    limit: float = math.inf,
    unit: str = "us",
    better: str = "lower",
) -> Goal:
    return Goal(figure, beside, (ours, unit), (theirs, unit), limit, better, guarded=True)


def _echoes() -> list[Goal]:
    """The echo of the README: every size, both loops, and a limit of time."""
    beside = "ib_send_lat -e"
    small = name("echo", SMALL)
    found = [
        _row(
            f"echo, {title(size)}, half round trip", beside, name("echo", size),
            latency_name(size), limit,
        )
        for size, limit in ECHOES.items()
    ]  # fmt: skip
    asyncios = name("echo", SMALL, "asyncio")
    timed, untimed = name("timeout", SMALL), name("untimed", SMALL)
    without = "without it"
    found[1:1] = [
        _row("echo, 64 B, on asyncio's loop", beside, asyncios, latency_name(SMALL), 1.75),
        _row("echo, 64 B, asyncio.timeout around each recv", without, timed, small, 1.08),
        _row("echo, 64 B, asyncio.timeout around nothing", without, untimed, small),
    ]
    return found


def _others() -> list[Goal]:
    """What else a Python programmer would take: over TCP, and on the verbs."""
    echo, small = "echo, 64 B, half round trip", name("echo", SMALL)
    large = name("echo", LARGE)
    found = [
        _row(echo, "TCP", small, name("echo", SMALL, over="tcp"), 1.0),
        _row(
            "echo, 64 B, on asyncio's loop", "TCP",
            name("echo", SMALL, "asyncio"), name("echo", SMALL, "asyncio", "tcp"), 1.0,
        ),
        _row(echo, "pyzmq", small, name("echo", SMALL, over=ZMQ), 1.0),
        _row("echo, 64 KiB, half round trip", "pyzmq", large, name("echo", LARGE, over=ZMQ)),
        # The check leaves it out: its script needs half a minute to start.
        Goal(echo, PYVERBS, (small, "us"), ("pyverbs", "event send us"), 1.0),
        _row(echo, IBVERBS, small, "ibverbs", 0.9),
    ]  # fmt: skip
    write = (name(*ONE_SIDED), "write bytearray us")
    for figure, ours, beside, what, limit in (
        (echo, (small, "us"), POLLED, "poll us", math.inf),
        ("WRITE, 64 B, bytes", write, IBVERBS, "write us", 0.9),
        ("WRITE, 64 B, bytes", write, POLLED, "write poll us", math.inf),
    ):
        found.append(Goal(figure, beside, ours, ("ibverbs", what), limit, guarded=True))
    return found


def _connections() -> list[Goal]:
    """Many of them at once, idle ones, and those whose peer is killed."""
    at_once = f"connections a second, {AT_ONCE} at once"
    rate = "connections a second"
    found = [
        Goal(
            figure, "cmtime", (name(form, AT_ONCE), rate), (f"cmtime {AT_ONCE}", rate), limit,
            "higher", guarded=True,
        )
        for figure, form, limit in (
            (at_once, "connects", 0.35), (f"{at_once}, with a pool", "pool", 0.45)
        )
    ]  # fmt: skip
    for form, way in SAME_SIZES.items():
        figure = at_once if form == "connects" else f"{at_once}, with a pool"
        in_c = (connecting(AT_ONCE, way).name, rate)
        ours = (name(form, AT_ONCE), rate)
        found.append(Goal(figure, "in C with our sizes", ours, in_c, math.inf))
    for form, kind, limit in (
        ("memory", "pinned", 64), ("memory", "resident", 112), ("streams", "resident", 160)
    ):  # fmt: skip
        what = "stream" if form == "streams" else "connection"
        figure = f"{kind} memory of an idle {what}, an end"
        where = (name(form, HELD), f"{kind} KiB")
        found.append(Goal(figure, "", where, None, limit, guarded=True))
    idle = (name("idle", AT_ONCE), "us/s")
    figure = f"processor time of {AT_ONCE} idle connections, both ends"
    # Connections that were made at once ask at once.
    asked = (connecting(AT_ONCE, ASKED[1]).name, "us/s")
    found += [
        Goal(figure, "the same questions in C", idle, asked, 3, guarded=True),
    ]
    # The second row is the floor of the first: Soft-RoCE is a program, and each post is its work.
    fanned = name(FAN_OUT, FANNED)
    for alone, what, most in (
        ("`await conn.send` in turn", "in turn us", 0.6),
        ("the posts alone, in C", "posts us", 1.02),
    ):
        figure = f"1 KiB to {FANNED} connections, Broadcast"
        found.append(
            Goal(figure, alone, (fanned, "together us"), (fanned, what), most, guarded=True)
        )
    # The check leaves them out: they take minutes.
    killed, events = (name(form, KILLED) for form in DEATHS)
    for part in "p50 us", "p99 us":
        found.append(
            Goal(
                f"peer killed, until recv raises, {part.split()[0]}", "the kernel's event",
                (killed, part), (events, part), 1.05,
            )
        )  # fmt: skip
    return found


def _rates() -> list[Goal]:
    """One way, and many callers."""
    one_way = name("one-way", SMALL)
    one, hundred, thousand = (name("callers", number) for number in CALLERS)
    hundred_tcp = name("callers", CALLERS[1], over="tcp")
    requests, thousand_requests = (name("requests", number) for number in CALLERS[1:])
    asked = [
        _row(
            f"a request, {number} caller{'s' * (number > 1)}", "TCP",
            name("requests", number), name("callers", number, over="tcp"), limit,
        )
        for number, limit in REQUESTERS.items()
    ]  # fmt: skip
    asked += [
        _row(
            f"calls by hand, a task for each, {number} callers", "TCP",
            name("tasked", number), name("callers", number, over="tcp"),
        )
        for number in MANY_REQUESTERS
    ]  # fmt: skip
    ours, theirs = name("requests", 1, "asyncio"), name("callers", 1, "asyncio", "tcp")
    return [
        *asked,
        _row("a request, 1 caller, on asyncio's loop", "TCP", ours, theirs, 0.75),
        *(
            _row(figure, beside, ours, theirs, limit, "Mpps", "higher")
            for figure, beside, ours, theirs, limit in (
                ("one way, 64 B", "ib_send_bw -e", one_way, "ib_send_bw -e 64", 1.0),
                ("one way, 64 B", "ib_send_bw -e -l 16", one_way, "ib_send_bw -e -l 16 64", 0.6),
                ("calls, 100 callers", "TCP", hundred, hundred_tcp, 1.5),
                ("calls, 100 callers", "1 caller", hundred, one, 2.0),
                ("calls, 1,000 callers", "100 callers", thousand, hundred, 0.95),
                ("requests, 1,000 callers", "100 callers", thousand_requests, requests, math.inf),
            )
        ),
    ]


def _asks() -> list[Goal]:
    """Requests beside other packages, and by a pool."""
    ask, pooled, timed = ASKS
    figure = f"requests of 200 B, {ASKERS} callers"
    ours = (name(ask, ASKERS), "Mpps")
    return [
        _row(
            f"Pool.request, {POOL_ASKERS} callers", "Connection.request",
            name(pooled, POOL_ASKERS), name(timed, POOL_ASKERS), 1.1,
        ),
        *(
            # The check leaves grpc.aio out: few machines have it.
            Goal(
                figure, package, ours, (name(ask, ASKERS, loop, over), "Mpps"), least, "higher",
                guarded=over != "grpc",
            )
            for over, (package, loop, least) in ASKING.items()
        ),
    ]  # fmt: skip


def _streams() -> list[Goal]:
    """asyncio's streams."""
    lines, blocks, pieces = STREAMS
    bandwidth = "stream bandwidth, 64 KiB, write and drain"
    tcp = name(*pieces, over="tcp")
    return [
        _row(
            "line over streams, 64 B, half round trip",
            "TCP",
            name(*lines),
            name(*lines, over="tcp"),
            0.9,
        ),
        _row(
            "line over streams, 64 B, half round trip",
            FASTNET,
            name(*lines),
            name(*lines, over=FASTNET),
            1.0,
        ),
        _row(
            "block over streams, 64 KiB, half round trip",
            FASTNET,
            name(*blocks),
            name(*blocks, over=FASTNET),
        ),
        _row(bandwidth, "rstream", name(*pieces), f"rstream {LARGE}", 1.1, "MiB/s", "higher"),
        # The device decides: the table of the large messages has C beside TCP.
        _row(bandwidth, "TCP", name(*pieces), tcp, unit="MiB/s", better="higher"),
    ]


def _dask() -> list[Goal]:
    """Comms of distributed; the check takes the message and the array of 16 MiB."""
    found = []
    for (form, number), limit in DASK.items():
        unit, better = ("us", "lower") if form == "dask-message" else ("MiB/s", "higher")
        what = "message, half a round trip" if form == "dask-message" else "array, one way"
        found.append(
            Goal(
                f"Dask, {title(number)}, {what}", "tcp://",
                (name(form, number), unit), (name(form, number, over="tcp"), unit),
                math.inf if limit is None else limit, better, guarded=limit is not None,
            )
        )  # fmt: skip
    ours, tcp = (name(*ARRAY, over=over) for over in ("rdma", "tcp"))
    title_of = f"Dask, {title(ARRAY[1])}, array"
    spent = f"{title_of}, processor time a byte"
    read = (f"ib_read_bw -e {1 << 20}", "MiB/s")
    return [
        *found,
        Goal(
            f"{title_of}, one way", "aiordma's streams, 64 KiB",
            (ours, "MiB/s"), (name(*STREAMS[-1]), "MiB/s"), 1.0, "higher", guarded=True,
        ),
        # Soft-RoCE alone takes more than TCP in all.
        Goal(
            f"{spent}, both processes", "tcp://", (ours, PROCESSES), (tcp, PROCESSES), math.inf,
            guarded=True,
        ),
        Goal(
            f"{spent}, less that of ib_read_bw", "tcp://",
            (ours, "ns/B"), (tcp, "ns/B"), 1.0, guarded=True, less=read,
        ),
        *_dask_iwarp(),
    ]  # fmt: skip


def _dask_iwarp() -> list[Goal]:
    """The same in a guest with software iWARP, which computes no checksum of a packet."""
    message, array = (
        (f"Dask on software iWARP, {title(number)}", [
            name(form, number, over=over, device=IWARP) for over in ("rdma", "tcp")
        ])
        for form, number in DASK_IWARP
    )  # fmt: skip

    def row(which: tuple[str, list[str]], what: str, unit: str, limit: float, **more: Any) -> Goal:
        text, (ours, tcp) = which
        return Goal(f"{text}, {what}", "tcp://", (ours, unit), (tcp, unit), limit, **more)

    spent = "array, processor time a byte"
    return [
        row(message, "message, half a round trip", "us", 1.0),
        row(array, "array, one way", "MiB/s", math.inf, better="higher"),
        row(array, f"{spent}, with the kernel's threads", "ns/B", 1.0, guarded=True),
        # The device's threads do half of the work for our processes, and none for TCP's.
        row(array, f"{spent}, both processes", PROCESSES, math.inf, guarded=True),
    ]


def _one_sided() -> list[Goal]:
    """READ and WRITE with memory of each kind; an SGE that is made each time costs most of it."""
    beside = {"READ": ("ib_read_lat -e", "us"), "WRITE": ("one_sided.c", "write, inline us")}
    atomic = ("ib_atomic_lat -e", "us")
    atomics = [
        Goal(call, atomic[0], (name(*ONE_SIDED), f"{call} us"), atomic, ATOMIC, guarded=True)
        for call in ATOMICS
    ]
    return [
        Goal(
            f"{transfer}, 64 B, {kind}", theirs[0],
            (name(*ONE_SIDED), f"{transfer.lower()} {kind} us"), theirs, limit, guarded=True,
        )
        for kind, limit in MEMORY.items()
        for transfer, theirs in beside.items()
    ] + atomics  # fmt: skip


def _buffers() -> list[Goal]:
    """Messages out of, and into, memory of each kind, beside bytes."""
    return [
        Goal(
            f"{way}, {title(size)}, half round trip", "bytes",
            (name(BUFFERS, size), figure), (name(BUFFERS, size), "recv us"), limit, guarded=True,
        )
        for size in BUFFER_SIZES
        for way, (figure, limit) in WAYS.items()
    ] + [
        Goal(
            f"one way, 64 B, {kind}", "bytes",
            (name(OUTGOING, SMALL), f"{kind} us"), (name(OUTGOING, SMALL), "bytes us"), limit,
            guarded=True,
        )
        for kind, limit in KINDS.items()
    ]  # fmt: skip


def _batches() -> list[Goal]:
    """1,000 transfers in a batch.

    A READ of Soft-RoCE, which is a program on the same processor, takes 23 of the 54 microseconds
    of one that is awaited, whoever posts it: no batch is more than 2.3 times as fast as that.
    """
    ours, batch = name(*ONE_SIDED), "batch of 1,000 READs, 64 B"
    return [
        Goal(
            batch, "ib_read_bw -e -l 16", (ours, "batch, read Mpps"),
            (listed_reads().name, "Mpps"), 0.6, better="higher", guarded=True,
        ),
        Goal(
            batch, "awaited one by one", (ours, "batch, read bytes us"),
            (ours, "read bytearray us"), 0.25, guarded=True,
        ),
        Goal(
            batch, "awaited together", (ours, "batch, read bytes us"), (ours, "gathered us"), 0.25,
            guarded=True,
        ),
        Goal(
            f"{batch}, pieces", "awaited one by one", (ours, "batch, read pieces us"),
            (ours, "read region us"), math.inf, guarded=True,
        ),
        Goal(
            "batch of 1,000 WRITEs, 64 B", "awaited one by one", (ours, "batch, write bytes us"),
            (ours, "write bytearray us"), math.inf, guarded=True,
        ),
    ]  # fmt: skip


def _noted() -> list[Goal]:
    """A write that the peer is told of, beside a message of the same bytes."""
    forms = {"number": "write(imm=) and recv", "note": "write(imm=) and notes"}
    return [
        Goal(
            f"{what}, {title(which[1])}, half round trip", "send and recv",
            (name(*which), f"{form} us"), (name(*which), "message us"), limit, guarded=True,
        )
        for which, limit in NOTED.items()
        for form, what in forms.items()
    ]  # fmt: skip


ROWS: tuple[Goal, ...] = (
    *_echoes(),
    *_others(),
    *_rates(),
    *_asks(),
    *_one_sided(),
    *_buffers(),
    *_batches(),
    *_noted(),
    *_streams(),
    *_dask(),
    *_connections(),
)
