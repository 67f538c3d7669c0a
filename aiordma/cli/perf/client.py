"""The client of a test: connects, has each size measured, and collects both sides' figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiordma.cli.foreign import real
from aiordma.cli.perf.control import CONFIG, Control, PerfError, foreign, processor_time
from aiordma.cli.perf.kinds import ClientSide, Stop
from aiordma.cli.perf.options import LOOPS, Plan
from aiordma.cli.perf.report import Usage, flow_figures, lat_figures
from aiordma.cli.perf.sides import client_side
from aiordma.endpoint.connect import connect
from aiordma.endpoint.connection import Connection
from aiordma.loop.timers import timeout

__all__ = ["Measured", "measure"]

_MOST_S = 1e9
Measured = Callable[[dict[str, Any]], None]


async def measure(
    plan: Plan,
    host: str,
    port: int,
    *,
    loop: str,
    gbits: bool,
    begun: Callable[[dict[str, Any]], None],
    measured: Measured,
) -> None:
    """Run a plan against a server.

    Args:
        plan: The measurement.
        host: The server's address.
        port: Its port.
        loop: Name of the loop that this runs on, for the figures.
        gbits: Bandwidth in Gb/s instead of MiB/s.
        begun: Called with the facts of the test before the first measurement.
        measured: Called with the figures of each size.

    Raises:
        PerfError: The server has failed, or cannot do the test.
        OSError, RdmaError: The connection was not made, or broke.
        TimeoutError: A step took longer than the plan says.
    """
    async with connect(host, port, config=CONFIG, timeout=plan.timeout_s) as conn:
        _check_transport(plan, conn)
        control = Control(conn, plan.timeout_s)
        answer = await control.ask("at", plan=plan.to_wire(), loop=loop)
        with foreign(answer):
            server_loop = LOOPS[LOOPS.index(answer.get("loop", loop))]
        side = client_side(plan, _host_of(conn))
        try:
            async with timeout(plan.timeout_s):
                await side.connect(answer["at"])
                lent = await control.hear("lent")
                await side.meet(lent["lent"])
            begun({"server_loop": server_loop, **_whereabouts(conn)})
            for size in plan.sizes:
                if plan.warm_up:
                    await _run(control, side, plan, size, Stop(plan.warm_up), plan.warm_up, gbits)
                count = None if plan.duration_s is not None else plan.iters
                stop = Stop(count, plan.duration_s)
                figures = await _run(control, side, plan, size, stop, count, gbits)
                measured({**figures, "loop": loop, "wait": plan.wait, "api": plan.api})
            await control.ask("bye", bye=True)
        finally:
            await side.close()


async def _run(
    control: Control,
    side: ClientSide,
    plan: Plan,
    size: int,
    stop: Stop,
    count: int | None,
    gbits: bool,
) -> dict[str, Any]:
    """One measurement of one size."""
    await control.ask("go", run=size, count=count)
    before = processor_time()
    figures: dict[str, Any]
    async with timeout(plan.limit_s):
        if plan.metric == "lat":
            figures = lat_figures(size, await side.lat(size, stop), half=plan.is_half)
        else:
            figures = flow_figures(size, await side.flow(size, stop), gbits=gbits)
    after = processor_time()
    done = figures["n_iterations"]
    theirs = await control.ask("user", "system", ran=done)
    with foreign(theirs):
        used = Usage(*(real(theirs[name], 0, _MOST_S) for name in ("user", "system")))
    figures["cpu_us_per_message"] = {
        "client": Usage(after.user - before.user, after.system - before.system).per(done),
        "server": used.per(done),
    }
    return figures


def _check_transport(plan: Plan, conn: Connection) -> None:
    """Refuse a test that would fail in the middle.

    Raises:
        PerfError: The transport does not support the test.
    """
    if conn.get_extra_info("transport") != "IWARP":
        return
    where = f"{conn.get_extra_info('device')} is iWARP, "
    if plan.test == "atomic":
        raise PerfError(where + "which has no atomic operations")
    if plan.test == "send" and plan.api == "native" and plan.metric != "lat":
        # A message that finds no receive ends the connection there.
        raise PerfError(where + "where nothing holds back a fast sender: use --api connection")


def _host_of(conn: Connection) -> str:
    """The server's numeric address, with the interface of one that is link-local."""
    host, _, *more = conn.get_extra_info("peername")
    return f"{host}%{more[1]}" if any(more) else host


def _whereabouts(conn: Connection) -> dict[str, Any]:
    """The device and the addresses that were used."""
    names = {"sockname": "client_addr", "peername": "server_addr"}
    facts: dict[str, Any] = {key: conn.get_extra_info(key) for key in ("device", "transport")}
    for key, name in names.items():
        address = conn.get_extra_info(key)
        facts[name] = None if address is None else address[0]
    return facts
