"""The tables in the pages of docs/, made from what was measured.

A page has pairs of markers; `PAGES` names them, and what makes the text between.  A figure that was
not measured is a dash.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from tests.bench import growth_queues, growth_sharing, jobs, large_peer, plain, sweeps, tables
from tests.bench.goals import CONNECTS, GOALS, MEMORY, MESSAGES, Goal, Outcome, Results, sample
from tests.bench.growth_registration import SIZES, title
from tests.bench.machine import Measured
from tests.bench.tables import Row, markdown, stacked
from tests.bench.tenfold import tenfold_table

Maker = Callable[[Measured, Sequence[Outcome]], str]


def text(value: float | None) -> str:
    """A number with the digits that mean something."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tenths(value: float | None) -> str:
    """Microseconds of a message."""
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def ratio(ours: float | None, theirs: float | None) -> str:
    """Ours over theirs."""
    return "-" if ours is None or not theirs else f"{ours / theirs:.2f}"


def median(results: Results, job: str, figure: str) -> float | None:
    """The middle of all rounds."""
    found = sample(results, (job, figure))
    return None if found is None else found.median


def grown(results: Results, job: str, figure: str, side: str = "ours") -> float | None:
    """A figure of a program for growth."""
    return median(results, f"growth {job}", f"{figure}, {side}")


# docs/benchmarks.md

#: The rows that stand for all others: figure and what is beside it.
SHORT = (
    ("echo, 64 B, half round trip", "ib_send_lat -e"),
    ("echo, 64 B, half round trip", "TCP"),
    ("echo, 64 B, on asyncio's loop", "TCP"),
    ("a request, 100 callers", "TCP"),
    ("echo, 1 MiB, half round trip", "ib_send_lat -e"),
    ("READ, 64 B, bytearray", "ib_read_lat -e"),
    ("WRITE, 64 B, bytearray", "one_sided.c"),
    ("line over streams, 64 B, half round trip", "TCP"),
    ("stream bandwidth, 64 KiB, write and drain", "rstream"),
    ("stream bandwidth, 64 KiB, write and drain", "TCP"),
    ("connections a second, 50 at once", "cmtime"),
)


def short(_: Measured, rows: Sequence[Outcome]) -> str:
    """The ratios of `SHORT`, and which way is better."""
    found = {(row.goal.figure, row.goal.beside): row for row in rows}
    shown: list[Row] = []
    for key in SHORT:
        row = found[key]
        better = "less" if row.goal.better == "lower" else "more"
        shown.append((*key, "-" if row.value is None else f"{row.value:.2f}, {better} is better"))
    return markdown(("figure", "beside", "ours / theirs"), shown)


# docs/benchmarks-all.md


def goals(which: Sequence[Goal]) -> Maker:
    """These rows with their goals."""

    def make(_: Measured, rows: Sequence[Outcome]) -> str:
        shown = [tables.page_goal(tables.goal_row(row)) for row in rows if row.goal in which]
        return markdown(tables.PAGE_GOAL_HEAD, shown)

    return make


def figures(names: Sequence[str]) -> Maker:
    """All figures of these jobs."""

    def make(measured: Measured, _: Sequence[Outcome]) -> str:
        rows = tables.figure_rows(measured.results, names)
        return markdown(tables.PAGE_FIGURES_HEAD, [tables.page_figure(row) for row in rows])

    return make


def swept(curves: Sequence[sweeps.Sweep]) -> Maker:
    """Ours and the ratio to the other's, for curves over the same points."""

    def make(measured: Measured, _: Sequence[Outcome]) -> str:
        head = ["bytes" if curves[0].over == "size" else "depth"]
        for curve in curves:
            head += [f"{curve.name}, {curve.unit}", f"/ {curve.beside}"]
        rows: list[Row] = []
        for point in curves[0].points:
            cells = [f"{point:,}"]
            for curve in curves:
                ours, theirs = (
                    median(measured.results, curve.job_name(who, point), curve.unit)
                    for who in ("ours", "theirs")
                )
                cells += [text(ours), ratio(ours, theirs)]
            rows.append(tuple(cells))
        return stacked(tuple(head), rows, 2)  # a table for each curve

    return make


_PLAIN = {
    "one-way": "{} bytes, one way, a message",
    "callers": "{} callers, a call",
    "echo": "{} bytes, half a round trip",
    "lines": "a line of {} bytes, half a round trip",
    "blocks": "{} bytes over streams, half a round trip",
    "pieces": "{} bytes over streams, one way",
}


def beside_tcp(measured: Measured, _: Sequence[Outcome]) -> str:
    """Ordinary programs over aiordma and over TCP."""
    head = ["microseconds"]
    for loop in jobs.LOOPS:
        head += [f"aiordma, {loop}", f"TCP, {loop}", "ratio"]
    rows: list[Row] = []
    for form, number in (*plain.BESIDE_TCP, *plain.STREAMS):
        cells = [_PLAIN[form].format(f"{number:,}").replace("1 callers", "1 caller")]
        for loop in jobs.LOOPS:
            ours, theirs = (
                median(measured.results, plain.name(form, number, loop, over), "us")
                for over in ("rdma", "tcp")
            )
            cells += [text(ours), text(theirs), ratio(ours, theirs)]
        rows.append(tuple(cells))
    return stacked(tuple(head), rows, 3)  # a table for each loop


#: 64 KiB over TCP, in C over the device, and over aiordma: what, its unit, and the three jobs.
_BULK = (
    (
        "half a round trip, us", "us",
        plain.name("echo", plain.LARGE, over="tcp"),
        plain.latency_name(plain.LARGE),
        plain.name("echo", plain.LARGE),
    ),
    (
        "one way, MiB/s", "MiB/s",
        plain.name("pieces", plain.LARGE, over="tcp"),
        f"ib_send_bw -e {plain.LARGE}",
        f"aiordma send bw {plain.LARGE} native uvloop",
    ),
    (
        "one way over streams, MiB/s", "MiB/s",
        plain.name("pieces", plain.LARGE, over="tcp"),
        f"rstream {plain.LARGE}",
        plain.name("pieces", plain.LARGE),
    ),
    (
        "READ, beside one way over TCP, MiB/s", "MiB/s",
        plain.name("pieces", plain.LARGE, over="tcp"),
        f"ib_read_bw -e {plain.LARGE}",
        f"aiordma read bw {plain.LARGE} native uvloop",
    ),
)  # fmt: skip


def bulk(measured: Measured, _: Sequence[Outcome]) -> str:
    """What 64 KiB take over TCP, in C over the device, and over aiordma."""
    head = ("64 KiB", "TCP", "C", "aiordma")
    rows: list[Row] = []
    for what, unit, *names in _BULK:
        tcp, program, ours = (median(measured.results, job, unit) for job in names)
        rows.append((what, *(text(value) for value in (tcp, program, ours))))
    return markdown(head, rows)


def large(measured: Measured, _: Sequence[Outcome]) -> str:
    """Half a round trip of large messages with their check, and without."""
    head = ("bytes", "checked, us", "not checked, us", "ns a byte")
    rows: list[Row] = []
    for size in large_peer.SIZES:
        checked, not_checked = (
            median(measured.results, f"large {check}", f"{size} us") for check in jobs.CHECKS
        )
        cost = None if checked is None or not_checked is None else checked - not_checked
        a_byte = None if cost is None else cost * 1000 / size
        rows.append((f"{size:,}", *(text(n) for n in (checked, not_checked, a_byte))))
    return markdown(head, rows)


# docs/costs.md


def costs(measured: Measured, _: Sequence[Outcome]) -> str:
    """What the calls of docs/costs.md take."""
    rows = [
        (call, tenths(median(measured.results, job, figure))) for call, job, figure in plain.COSTS
    ]
    return markdown(("call", "us"), rows)


def versions(measured: Measured, _: Sequence[Outcome]) -> str:
    """A list of them."""
    return "\n".join(f"- {name} {value}" for name, value in measured.versions.items())


# docs/perf.md


def waits(measured: Measured, _: Sequence[Outcome]) -> str:
    """What each way to wait gives."""
    shown = (
        ("send lat", "us"),
        ("read lat", "us"),
        ("send rate 128", "k/s"),
        ("send rate 1", "k/s"),
    )
    rows: list[Row] = []
    for test, unit in shown:
        cells = [f"`{test}`, {unit}"]
        name = "us" if unit == "us" else "Mpps"
        for wait in jobs.WAITS:
            value = median(measured.results, f"wait {wait} {test}", name)
            cells.append(text(value if value is None or unit == "us" else value * 1000))
        rows.append(tuple(cells))
    return markdown(("`--wait`", *(f"`{wait}`" for wait in jobs.WAITS)), rows)


# docs/hot-path.md

_FLOORS = {
    "pump": "the same exchange in C with epoll, and no event for a send",
    "reader": "a C function that the loop calls, and that answers: no line of Python",
    "callback": "a reader callback in Python that answers with one C call",
    "resume": "a task that a C function resumes, as here, and that calls C twice",
    "wakeup": "a task that a Python callback resumes, and that calls C once",
    "future": "the same with a future",
}


def floors(measured: Measured, _: Sequence[Outcome]) -> str:
    """What is there beside a message of the library's, with and without a timer in the loop."""
    head = ["us"]
    head += [loop + more for more in ("", ", a timer in the loop") for loop in jobs.LOOPS]
    results = measured.results
    none = ("",) * len(jobs.LOOPS)
    rows: list[Row] = [
        ("`ib_send_lat -e`", tenths(median(results, "ib_send_lat -e", "us")), *[""] * 3)
    ]
    for way in jobs.WAYS:
        names = [f"floor {way} {loop} {timer}" for timer in jobs.TIMERS for loop in jobs.LOOPS]
        cells = [tenths(median(results, name, "us")) for name in names]
        # The first has no loop.
        rows.append((_FLOORS[way], *(cells if way != jobs.WAYS[0] else [cells[0], "", "", ""])))
    for what, job in (
        ("aiordma, `data_received` that answers", "stream lat 64 protocol"),
        ("aiordma, `send` and `recv`, awaited", "send lat 64 connection"),
    ):
        names = [f"aiordma {job} {loop}" for loop in jobs.LOOPS]
        rows.append((what, *(tenths(median(results, name, "us")) for name in names), *none))
    return markdown(tuple(head), rows)


# docs/growth.md

SPENT = "processor time per idle connection, connecting end"
MAPPINGS = "memory mappings per connection, connecting end"
LIMITS = ("max_qp", "max_mr", "max_cq", "max_cqe")


def connects(measured: Measured, _: Sequence[Outcome]) -> str:
    """Connections a second."""
    rows: list[Row] = []
    for name, more, goal in (
        ("small slots", "", ">= 0.5"),
        ("default settings", " (ordinary settings)", ""),
    ):
        ours, theirs = (
            grown(measured.results, "connect", CONNECTS + more, side) for side in ("ours", "theirs")
        )
        rows.append((name, text(ours), text(theirs), ratio(ours, theirs), goal))
    return markdown(("", "ours", "cmtime", "ratio", "goal"), rows)


_EACH = "memory per connection (KiB)"
IDLE = (
    ("Python memory, connecting end", f"{MEMORY}, connecting end", "KiB"),
    ("Python memory, accepting end", f"{MEMORY}, accepting end", "KiB"),
    ("resident memory, connecting end", f"resident {_EACH}, connecting end", "KiB"),
    ("resident memory, accepting end", f"resident {_EACH}, accepting end", "KiB"),
    ("processor time without PING", SPENT, "us a second"),
    ("descriptors", "descriptors per connection, connecting end", ""),
    ("memory mappings", MAPPINGS, ""),
)


def idle(measured: Measured, _: Sequence[Outcome]) -> str:
    """One idle connection more."""
    rows: list[Row] = []
    for name, figure, unit in IDLE:
        value = grown(measured.results, "memory", figure)
        # The difference of two times, which comes out below 0 where there is none.
        value = value and max(value, 0.0)
        rows.append((name, f"{text(value)} {unit}".rstrip()))
    return markdown(("an idle connection, small slots", ""), rows)


def messages(measured: Measured, _: Sequence[Outcome]) -> str:
    """A message among many connections."""
    rows: list[Row] = []
    name = MESSAGES.replace("1,000", "{:,}")
    for count in (1, 10, 100, 1000):
        each = name.format(count)
        every = grown(measured.results, "messages", each)
        ten = grown(measured.results, "messages", f"{each}, 10 of them used")
        base = grown(measured.results, "messages", each, "theirs")
        rows.append(
            (f"{count:,}", text(every), "" if count <= 10 else text(ten), ratio(every, base))
        )
    return markdown(("connections", "all of them used, us", "ten of them used, us", "/ 10"), rows)


def shared(job: str, program: ModuleType, what: Sequence[str]) -> Maker:
    """The same with and without sharing, by the number of connections: a row for a figure of each.

    Args:
        job: The program's name.
        program: Its module.
        what: Its figures, as they are called among many connections.
    """

    def make(measured: Measured, _: Sequence[Outcome]) -> str:
        rows: list[Row] = []
        for figure, count in itertools.product(what, program.COUNTS):
            # Where there are few, the few are all, and what all share is too large a part of their
            # memory.
            if count == program.FEW and ("resident" in figure or "all busy" in figure):
                continue
            few = count == program.FEW
            named = figure.replace(f"{program.FEW} busy", "all busy") if few else figure
            cells = (
                text(grown(measured.results, job, program.name(setting, count, named)))
                for setting in program.SETTINGS
            )
            rows.append((f"{count:,}: {figure}", *cells))
        return markdown((program.COUNTED, *program.SETTINGS), rows)

    return make


_BUSY = ("10 busy, us", "10 busy, wake-ups", "all busy, us", "all busy, wake-ups")


def registration(measured: Measured, _: Sequence[Outcome]) -> str:
    """Registering, and the cache."""
    rows: list[Row] = []
    for size in SIZES:
        name = title(size)
        named = (f"registering {name}", f"deregistering {name}")
        cached = (f"cache {what}, {name}, beside registering it" for what in ("hit", "miss"))
        values = (grown(measured.results, "registration", each) for each in (*named, *cached))
        rows.append((name, *(text(value) for value in values)))
    return markdown(("", "register", "deregister", "hit", "miss"), rows)


def tenfold(measured: Measured, _: Sequence[Outcome]) -> str:
    """The curve carried on."""
    results = measured.results
    return tenfold_table(
        python_kib=grown(results, "memory", MEMORY),
        idle_us=grown(results, "memory", SPENT),
        rate=grown(results, "connect", CONNECTS),
        mappings=grown(results, "memory", MAPPINGS),
        limits={name: grown(results, "registration", f"rxe0: {name}") for name in LIMITS},
    )


PAGES: Mapping[str, Mapping[str, Maker]] = {
    "benchmarks.md": {"short": short, "bulk": bulk},
    "benchmarks-all.md": {
        "ordinary": goals(plain.ROWS),
        "plain": beside_tcp,
        "idle": figures([job.name for job in plain.idle()]),
        "goals": goals(GOALS),
        "latency": swept([sweeps.LATENCY]),
        "sizes": swept(sweeps.OVER_SIZE),
        "depths": swept(sweeps.OVER_DEPTH),
        "large": large,
        "aiordma": figures([job.name for job in jobs.ours()]),
        "others": figures([job.name for job in jobs.programs()]),
        "spinning": figures([job.name for job in jobs.SPINNING]),
        "growth": figures(["growth connect", "growth memory", "growth messages"]),
        "versions": versions,
    },
    "costs.md": {"costs": costs},
    "hot-path.md": {"floors": floors},
    "growth.md": {
        "idle": idle,
        "connects": connects,
        "messages": messages,
        "sharing": shared(
            "sharing",
            growth_sharing,
            ("pinned KiB, idle", "resident KiB, idle", *_BUSY),
        ),
        "queues": shared("queues", growth_queues, ("resident KiB", *_BUSY)),
        "registration": registration,
        "tenfold": tenfold,
    },
    "perf.md": {"waits": waits},
}
