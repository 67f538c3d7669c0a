"""Which programs `make bench` runs, and with how many messages.

perftest talks over TCP before and after a test here, not over the connection manager (`-R`): with
`-R` the end that has nothing to do polls for the other's last word, and on one CPU takes half of
what there is.  ib_write_bw then shows 37 MiB/s in place of 74.

Programs of perftest spin unless they have `-e`.  Where both ends have to act, each spins until the
scheduler takes the CPU away, and their figure is the length of its tick: `SPINNING`.  Where only
the client acts, its spinning hurts nobody.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROUNDS = 5
WAITS = ("event", "adaptive", "spin")
TRIPS, WARM_UP = 300, 100
#: How many messages a bandwidth is taken over, by their size.
COUNTS = {64: 8000, 65_536: 320, 1 << 20: 32}
LOOPS = ("uvloop", "asyncio")
#: Made of one_sided.c by `machine.compile_programs`.
ONE_SIDED = Path(__file__).resolve().parents[2] / "build" / "bench" / "one_sided"
CONNECTING = ONE_SIDED.with_name("connecting")
#: Made of floors.c.
FLOORS = ONE_SIDED.with_name("floors.so")
#: Made of marks.c, instructions.c and accesses.c.
MARKS = ONE_SIDED.with_name("marks.so")
PLUGIN = ONE_SIDED.with_name("instructions.so")
ACCESSES = ONE_SIDED.with_name("accesses.so")
#: Numbers of connections that do nothing.
IDLE = (1, 50)
#: Words of connecting.c: memory and queues as those of the library's settings, by the form of
#: plain_many.py.
SAME_SIZES = {"connects": "defaults", "pool": "pool"}
#: How as many connections in C ask: words of connecting.c.
ASKED = ("spread", "together", "adapter")
#: Connections in C.
PAIRS = 100
#: Whether large messages are compared with checksums: words of large_peer.py.
CHECKS = ("checked", "unchecked")
#: How much of Python there is in a floor, by the names of floors.py; the first has no loop.
WAYS = ("pump", "reader", "callback", "resume", "wakeup", "future")
TIMERS = ("bare", "timer")
#: The GID of RoCE v2 and IPv4.
GID = "1"


@dataclass(frozen=True)
class Job:
    """A client and its server.

    Attributes:
        name: What its figures are called.
        parse: A key of `parse.PARSERS`.
        client: Its command, with `{address}` and `{port}`.
        server: The same; empty if there is none.
        listens: How the server listens: "rdma" or "tcp".
        rounds: How often it runs.
        endless: The server goes on when its client has ended.
        device: The software adapter of the guest: "rxe", or "siw".
        counted: Whether it runs in a guest whose clock counts instructions, or over the fabric, by
            the clock of this machine.
    """

    name: str
    parse: str
    client: tuple[str, ...]
    server: tuple[str, ...] = ()
    listens: str = "rdma"
    rounds: int = ROUNDS
    endless: bool = False
    device: str = "rxe"
    counted: bool = True

    def plan(self) -> dict[str, Any]:
        """What the guest needs to know."""
        return asdict(self)


def perftest(program: str, *options: str, name: str = "", rounds: int = ROUNDS) -> Job:
    """A program of perftest with itself; 64 bytes of a latency test are not named."""
    words = (program, *options, "-F", "-x", GID, "-p", "{port}")
    kind = "perftest_lat" if program.endswith("_lat") else "perftest_bw"
    return Job(name or program, kind, (*words, "{address}"), words, "tcp", rounds)


def sized(program: str, size: int, *options: str) -> Job:
    """A bandwidth of perftest."""
    name = " ".join((program, *options, str(size)))
    return perftest(program, *options, "-s", str(size), "-n", str(COUNTS[size]), name=name)


def rstream(size: int, count: int, rounds: int) -> Job:
    """rstream with itself, blocking; every piece goes there and back."""
    words = ("-p", "{port}", "-T", "b", "-S", str(size), "-C", str(count), "-I", str(rounds))
    server = ("rstream", "-b", "{address}", *words)
    return Job(f"rstream {size}", "rstream", ("rstream", "-s", "{address}", *words), server)


def perf(
    test: str,
    metric: str,
    size: int,
    api: str,
    loop: str,
    *options: str,
    count: int = 0,
    rounds: int = ROUNDS,
) -> Job:
    """`aiordma perf` with itself."""
    program = ("python:aiordma.cli.__main__", "perf")
    count = count or (TRIPS if metric == "lat" else COUNTS[size])
    warm_up = WARM_UP if metric == "lat" else 16
    words = ("-s", str(size), "-n", str(count), "-W", str(min(count, warm_up)), "--api", api)
    # The guest's clock may jump: a limit that is near would end a test that runs well.
    options = (*options, "--loop", loop, "--json", "-", "--timeout", "3000")
    return Job(
        f"aiordma {test} {metric} {size} {api} {loop}",
        "perf",
        (*program, test, metric, "{address}", "-p", "{port}", *words, *options),
        (*program, "--server", "--host", "{address}", "-p", "{port}", "--loop", loop),
        rounds=rounds,
    )


def pyverbs(name: str, module: str, rounds: int = ROUNDS) -> Job:
    """A script, which repeats on its own: it needs half a minute to start."""
    program = ("/usr/bin/python3", "-m", f"tests.bench.{module}")
    client, server = (
        (*program, role, "{address}", "{port}", str(rounds)) for role in ("client", "server")
    )
    return Job(name, "numbers", client, server, rounds=1)


def one_sided() -> Job:
    """READ and WRITE with events in C, which perftest has for READ alone; see one_sided.c."""
    return _own(ONE_SIDED)


def connecting(many: int = PAIRS, way: str = "only") -> Job:
    """Connections that have what the library's have; see connecting.c."""
    job = _own(CONNECTING, str(many), way)
    return job if many == PAIRS else replace(job, name=f"{job.name} {many} {way}")


def _own(program: Path, *words: str) -> Job:
    client, server = (
        (str(program), role, "{address}", "{port}", *words) for role in ("client", "server")
    )
    return Job(f"{program.name}.c", "numbers", client, server)


def cmtime(many: int) -> Job:
    """So many connects at once; its server does not end."""
    words = ("cmtime", "-p", "{port}")
    client = (*words, "-s", "{address}", "-c", str(many))
    server = (*words, "-b", "{address}")
    return Job(f"cmtime {many}", "cmtime", client, server, endless=True)


def waits() -> list[Job]:
    """Each way to wait, for the same tests."""
    found = []
    for wait in WAITS:
        for test, metric, *more in (
            ("send", "lat"),
            ("read", "lat"),
            ("send", "rate", "-t", "128"),
            ("send", "rate", "-t", "1"),
        ):
            # A round trip of two ends that spin takes two ticks of the scheduler.
            count = 20 if (wait, test, metric) == ("spin", "send", "lat") else 0
            job = perf(
                test, metric, 64, "native", "uvloop", *more, "--wait", wait, count=count, rounds=1
            )
            name = " ".join(("wait", wait, test, metric, *more[1:]))
            found.append(replace(job, name=name))
    return found


def programs() -> list[Job]:
    """The programs in C, and pyverbs."""
    trips = ("-s", "64", "-n", str(TRIPS))
    pong = ("ibv_rc_pingpong", "-e", "-g", GID, *trips, "-p", "{port}")
    return [
        perftest("ib_send_lat", "-e", *trips, name="ib_send_lat -e"),
        perftest("ib_read_lat", "-e", *trips, name="ib_read_lat -e"),
        perftest("ib_atomic_lat", "-e", "-n", str(TRIPS), name="ib_atomic_lat -e"),
        *(sized("ib_send_bw", size, "-e") for size in COUNTS),
        *(sized("ib_write_bw", size) for size in COUNTS),
        *(sized("ib_read_bw", size, "-e") for size in COUNTS),
        one_sided(),
        connecting(),
        Job("ibv_rc_pingpong -e", "pingpong", (*pong, "{address}"), pong, "tcp"),
        rstream(64, 1, TRIPS),
        rstream(65_536, 200, 1),
        pyverbs("pyverbs", "pyverbs_peer"),
        pyverbs("pyverbs connect", "pyverbs_connect"),
    ]


def floor(way: str, loop: str, timer: str) -> Job:
    """The least that a message can take in this way."""
    client, server = (
        ("python:tests.bench.floors", role, "{address}", "{port}", way, loop, timer)
        for role in ("client", "server")
    )
    return Job(f"floor {way} {loop} {timer}", "numbers", client, server, rounds=3)


def floors() -> list[Job]:
    """All of them."""
    first, *others = WAYS
    return [
        floor(first, LOOPS[0], TIMERS[0]),
        *(floor(way, loop, timer) for way in others for timer in TIMERS for loop in LOOPS),
    ]


def large() -> list[Job]:
    """Large messages with and without their check."""
    found = []
    for check in CHECKS:
        client, server = (
            ("python:tests.bench.large_peer", role, "{address}", "{port}", check)
            for role in ("client", "server")
        )
        found.append(Job(f"large {check}", "numbers", client, server, rounds=3))
    return found


def into() -> list[Job]:
    """Large messages into an array of the program."""
    found = []
    for check in CHECKS:
        client, server = (
            ("python:tests.bench.into_peer", role, "{address}", "{port}", check)
            for role in ("client", "server")
        )
        found.append(Job(f"recv_into {check}", "numbers", client, server))
    return found


def first() -> list[Job]:
    """Programs up to their first connection, by either clock; see first.py.

    The counted one needs few rounds, which differ by a thousandth.
    """
    words = (".venv/bin/python", "-m", "tests.bench.first", "{address}")
    return [
        Job("first", "numbers", (*words, "3"), rounds=1),
        Job("first, not counted", "numbers", (*words, "9"), rounds=1, counted=False),
    ]


#: Both ends spin: what they show is the scheduler.
SPINNING = (
    perftest("ib_send_lat", "-s", "64", "-n", "20", name="ib_send_lat", rounds=1),
    perftest("ib_write_lat", "-s", "64", "-n", "20", name="ib_write_lat", rounds=1),
    perftest("ib_send_bw", "-s", "65536", "-n", "320", name="ib_send_bw 65536", rounds=1),
)


def ours() -> list[Job]:
    """aiordma, all that has a goal or stands beside one."""
    found = []
    for loop in LOOPS:
        found += [
            perf("send", "lat", 64, "connection", loop),
            perf("send", "lat", 64, "native", loop),
            perf("stream", "lat", 64, "protocol", loop),
            perf("stream", "lat", 64, "streams", loop),
            perf("stream", "bw", 65_536, "protocol", loop),
            perf("stream", "bw", 65_536, "streams", loop),
            perf("read", "lat", 64, "connection", loop),
            perf("write", "lat", 64, "connection", loop),
            perf("send", "rate", 64, "native", loop, "-t", "128"),
        ]
    found.append(perf("atomic", "lat", 8, "connection", "uvloop"))
    found.append(perf("send", "rate", 64, "connection", "uvloop", "-t", "128"))
    for test in "send", "write", "read":
        for size in 65_536, 1 << 20:
            found.append(perf(test, "bw", size, "native", "uvloop"))
    return found + into()


def growth() -> list[Job]:
    """The programs that open many connections, or register much; each repeats on its own."""
    options = {
        "connect": ("--rounds", str(ROUNDS), "--settings", "lean,ordinary"),
        "memory": ("--many", "500"),
        "messages": ("--messages", "1000"),
        "sharing": (),
        "queues": (),
        "registration": (),
    }
    common = ("--json", "-", "--loop", "uvloop")
    return [
        Job(
            f"growth {name}",
            "growth",
            (".venv/bin/python", f"tests/bench/growth_{name}.py", *common, *more),
            rounds=1,
        )
        for name, more in options.items()
    ]
