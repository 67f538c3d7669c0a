"""A peer that is killed: `main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`.

The server accepts one client, tells it the number of its process, and waits for messages; when it
is killed, as by `kill -9`, another process takes its place.  All settings are the defaults.  So
many times the client connects, kills the server, and takes the time until it knows:

- `deaths`: a task of the client awaits `recv`, which raises.
- `events`: the same connection, but the program waits for the kernel's own event, in place of
  the event loop: in poll(2), for the descriptor of the connection manager.

Forks of this process are the servers, before it has opened a device.  The client prints one JSON
object: microseconds, half of the deaths and 99 of 100 of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import time
from collections.abc import Awaitable, Callable

import aiordma
from tests.bench.plain_peer import LOOPS, Told
from tests.inside.endpoint import link_of

__all__ = ["main"]

#: Before the clock runs.
WARM_UP = 3
#: Seconds between two tries to connect, while no server listens.
PAUSE_S = 0.1
END = b"end"


async def serve(address: str, port: int) -> None:
    """Serve one client until it says that this is the end."""
    async with aiordma.listen(address, port) as listener, await listener.accept() as conn:
        await conn.send(str(os.getpid()).encode())
        while bytes(await conn.recv()) != END:
            pass


async def connected(address: str, port: int) -> tuple[aiordma.Connection, int]:
    """A connection to the server that lives, and the number of its process."""
    while True:
        try:
            conn = await aiordma.connect(address, port)
        except ConnectionError:
            await asyncio.sleep(PAUSE_S)
            continue
        return conn, int(bytes(await conn.recv()))


async def until_raised(conn: aiordma.Connection, pid: int) -> float:
    """Seconds until `recv` has raised."""
    told = 0.0

    async def listen() -> None:
        nonlocal told
        try:
            await conn.recv()
        except ConnectionError:
            told = time.perf_counter()

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    begun = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    await listening
    return told - begun


async def until_event(conn: aiordma.Connection, pid: int) -> float:
    """Seconds until the kernel has an event for the connection."""
    poll = select.poll()
    poll.register(link_of(conn).cm_id.event_channel.fileno(), select.POLLIN)
    begun = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    poll.poll()
    return time.perf_counter() - begun


Wait = Callable[[aiordma.Connection, int], Awaitable[float]]
FORMS: dict[str, Wait] = {"deaths": until_raised, "events": until_event}


async def use(wait: Wait, number: int, address: str, port: int) -> Told:
    """Kill servers, and measure."""
    took: list[float] = []
    for _ in range(WARM_UP + number):
        conn, pid = await connected(address, port)
        took.append(await wait(conn, pid) * 1e6)
        conn.abort()
        await conn.wait_closed()
    conn, _ = await connected(address, port)
    await conn.send(END)
    await conn.close()
    took = sorted(took[WARM_UP:])
    return {"p50 us": took[number // 2], "p99 us": took[number * 99 // 100]}


def succeed(run: Callable[[], None]) -> int:
    """Run in a fork of this process, and in another when that was killed; its exit status."""
    while True:
        pid = os.fork()
        if not pid:
            run()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != -signal.SIGKILL:
            return code


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, form, number, loop, _over, address, port = words
    to = (address, int(port))

    def run() -> None:
        async def end() -> None:
            if role == "server":
                await serve(*to)
            else:
                print(json.dumps(await use(FORMS[form], int(number), *to)))

        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(end())

    if role == "server":
        return succeed(run)
    run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
