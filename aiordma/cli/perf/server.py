"""The server of a test: listens, gets the test's plan from the client, answers the client."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from aiordma.cli.foreign import whole
from aiordma.cli.perf.control import (
    CONFIG,
    LIMIT_S,
    LIMITS,
    Control,
    PerfError,
    foreign,
    processor_time,
)  # fmt: skip
from aiordma.cli.perf.options import Plan
from aiordma.cli.perf.sides import server_side
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.listener import listen
from aiordma.errors import RdmaError
from aiordma.loop.timers import timeout

__all__ = ["serve"]


async def serve(
    host: str | None, port: int, *, loop: str, listening: Callable[[str, int], None]
) -> None:
    """Serve one test.

    Args:
        host: Address to listen on.
        port: Port; 0 lets the kernel choose.
        loop: Name of the loop that this runs on.
        listening: Called with the address and the port.

    Waits for a client without limit, and from then on as long as the client's plan says.

    Raises:
        PerfError: The client asked for an impossible test, or broke off.
        OSError, RdmaError: No such address, or the connection broke.
        TimeoutError: A step took longer than the plan says.
    """
    async with listen(host, port, config=CONFIG, limits=LIMITS) as listener:
        listening(*listener.sockname)
        async with await listener.accept() as conn:
            control = Control(conn, LIMIT_S)
            try:
                await _serve(conn, control, loop)
            except (PerfError, OSError, RdmaError, ValueError) as exc:
                # Send the client the reason, if the connection still works.
                with contextlib.suppress(OSError, RdmaError):
                    await control.say(error=f"the server: {exc}")
                    async with timeout(1.0):
                        await conn.flush()
                if isinstance(exc, ValueError):
                    raise PerfError(str(exc)) from exc
                raise


async def _serve(conn: Connection, control: Control, loop: str) -> None:
    words = await control.hear("plan")
    plan = Plan.from_wire(words["plan"])
    host = conn.get_extra_info("sockname")[0]
    side = server_side(plan)
    try:
        at = await side.listen(host)
        await control.say(at=at, loop=loop)
        async with timeout(plan.timeout_s):
            lent = await side.accept()
        await control.say(lent=lent)
        while True:
            # The client is measuring, or works out its figures.
            words = await control.hear(limit_s=plan.limit_s)
            if "bye" in words:
                break
            size, count = words.get("run"), words.get("count")
            with foreign(words):
                size = plan.sizes[plan.sizes.index(size)]
                count = None if count is None else whole(count)
            await side.start(size, count)
            before = processor_time()
            await control.say(go=True)
            words = await control.hear("ran", limit_s=plan.limit_s)
            with foreign(words):
                ran = whole(words["ran"])
            async with timeout(plan.timeout_s):
                await side.finish(ran)
            after = processor_time()
            await control.say(user=after.user - before.user, system=after.system - before.system)
    finally:
        await side.close()
    await control.say(bye=True)
    with contextlib.suppress(PerfError):  # raised because the client has ended
        await control.hear()
