"""Many connections of ordinary programs: `main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`.

OVER is not used.  The server serves each client in a task of its own, and tells a client that asks
what its process takes of the machine.  Both ends have default settings, except with `pool`.

- `connects`: the client makes so many connections at once, with `asyncio.gather`.  The figures are
  connections a second, and microseconds of one, until all are there and the server has answered on
  the last.
- `pool`: the same with the slots of all connections in common, as on the page on sharing.
- `memory`: what each of so many idle connections takes of its process, KiB: pinned and resident,
  of each end, and of the end that takes more.  The differences between a few connections and so
  many more, divided.  Without huge pages: in the time in which nothing runs the kernel joins pages
  to huge pages, in some runs, and a process then has memory that it has never used.
- `streams`: the same of asyncio's streams.
- `fan-out`: the client sends messages of 1 KiB over all of so many connections, by a `Broadcast`
  and by an `await conn.send` for each in turn, and the server reads them.  The figures are
  microseconds of the client until the message is posted over all; and of the posts alone, by the C
  that both stand on.
- `idle`: processor time that so many connections take while both programs do nothing, microseconds
  a second, of each process and of both.  The kernel's part is in them: Soft-RoCE sends, receives
  and acknowledges in the process that posts.

The client prints one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable

import aiordma
from aiordma._core import MessageState
from tests.bench.growth_peer import memory
from tests.bench.plain_peer import LOOPS, Told

__all__ = ["main"]

#: Of the counted clock, which jumps over the time in which nothing runs.
IDLE_S = 200.0
#: Until the connections are as they stay: the first silence is over.
SETTLE_S = 30.0
#: Connects under way at a time, where they are not measured.
AT_ONCE = 10
#: Connections that are there before others are counted: what all have in common is there, too.
FEW = 10
#: The settings on the page on sharing.
POOL = aiordma.ConnectionConfig(
    shared_slots=9600, slot_size=4096, recv_depth=32, send_depth=16, rendezvous_window=2
)
#: Of a fan-out: bytes of a message, messages that are counted, and messages before.
FAN_OUT_BYTES, FAN_OUTS, FIRST_FAN_OUTS = 1024, 100, 20
SETTINGS = {"pool": POOL}
KINDS = ("pinned", "resident")
#: Of prctl(2).
_PR_SET_THP_DISABLE = 41


def spent() -> Told:
    """Seconds of the processor that this process has taken."""
    return {"s": time.process_time()}


def held() -> Told:
    """KiB that it holds."""
    now = memory()
    return {f"{kind} KiB": now[kind] / 1024 for kind in KINDS}


#: What a client may ask for.
TAKEN: dict[str, Callable[[], Told]] = {"spent": spent, "held": held}


def each(few: tuple[Told, Told], many: tuple[Told, Told], number: int) -> Told:
    """The memory of one connection more, of client and server, and of the larger of them."""
    found: Told = {}
    for kind in KINDS:
        name = f"{kind} KiB"
        here, there = ((many[end][name] - few[end][name]) / number for end in (0, 1))
        found |= {f"client {name}": here, f"server {name}": there, name: max(here, there)}
    return found


# Messages


async def tell(conn: aiordma.Connection) -> None:
    """Answer each message with what this process takes; one that is no question with nothing."""
    async with conn:
        async for question in conn:
            if len(question) == FAN_OUT_BYTES:
                await conn.send(b"")
                continue
            await conn.send(json.dumps(TAKEN[bytes(question).decode()]()).encode())


async def serve(form: str, address: str, port: int) -> None:
    """Serve until the first client has gone."""
    config = SETTINGS.get(form)
    async with (
        aiordma.listen(address, port, config=config) as listener,
        asyncio.TaskGroup() as clients,
    ):
        first = clients.create_task(tell(await listener.accept()))

        async def accept() -> None:
            async for conn in listener:
                clients.create_task(tell(conn))

        accepting = asyncio.create_task(accept())
        await first
        accepting.cancel()


async def both(conn: aiordma.Connection, question: str) -> tuple[Told, Told]:
    """What client and server take."""
    await conn.send(question.encode())
    there = json.loads(bytes(await conn.recv()))
    return TAKEN[question](), there


class Client:
    """The client's connections."""

    def __init__(self, config: aiordma.ConnectionConfig | None, address: str, port: int) -> None:
        self.connections: list[aiordma.Connection] = []
        self._to = (address, port)
        self._config = config

    async def connect(self, number: int) -> None:
        """Make so many more at once; the last of them is ready at both ends."""
        made = await asyncio.gather(
            *(aiordma.connect(*self._to, config=self._config) for _ in range(number))
        )
        self.connections += made
        await both(made[-1], "spent")

    async def grow(self, number: int) -> None:
        """Make more, some at a time, until there are so many; and wait until they are quiet."""
        while len(self.connections) < number:
            await self.connect(min(AT_ONCE, number - len(self.connections)))
        await asyncio.sleep(SETTLE_S)

    async def close(self) -> None:
        """Close all; the first one is the last, for the server."""
        while self.connections:
            await self.connections.pop().close()


async def connects(client: Client, number: int) -> Told:
    """Connections a second."""
    await client.connect(2)  # what is loaded and looked up once
    begun = time.perf_counter()
    await client.connect(number)
    took = time.perf_counter() - begun
    return {"connections a second": number / took, "us": took / number * 1e6}


async def grows(client: Client, number: int) -> Told:
    """Memory."""
    await client.grow(FEW)
    few = await both(client.connections[0], "held")
    await client.grow(FEW + number)
    return each(few, await both(client.connections[0], "held"), number)


async def fans_out(client: Client, number: int) -> Told:
    """One message for many."""
    await client.grow(number)
    connections = client.connections
    broadcast = aiordma.Broadcast(connections, slow="drop")
    states = tuple(conn._state for conn in connections)
    message = bytes(FAN_OUT_BYTES)

    async def together() -> None:
        assert (await broadcast.send(message)).sent == number

    async def in_turn() -> None:
        for conn in connections:
            await conn.send(message)

    async def posts() -> None:
        assert MessageState.send_each(states, message, None) is None

    told: Told = {}
    for name, send in (("together", together), ("in turn", in_turn), ("posts", posts)):
        took = 0.0
        for count in range(FIRST_FAN_OUTS + FAN_OUTS):
            begun = time.perf_counter()
            await send()
            if count >= FIRST_FAN_OUTS:
                took += time.perf_counter() - begun
            await asyncio.gather(*(conn.recv() for conn in connections))  # it has arrived
        told[f"{name} us"] = took / FAN_OUTS * 1e6
    return told


async def idles(client: Client, number: int) -> Told:
    """Processor time."""
    await client.grow(number)
    begun = await both(client.connections[0], "spent")
    await asyncio.sleep(IDLE_S)
    ended = await both(client.connections[0], "spent")
    here, there = (
        (end["s"] - begin["s"]) / IDLE_S * 1e6 for begin, end in zip(begun, ended, strict=True)
    )
    return {"client us/s": here, "server us/s": there, "us/s": here + there}


MEASURES: dict[str, Callable[[Client, int], Awaitable[Told]]] = {
    "connects": connects, "pool": connects, "memory": grows, "idle": idles,
    "fan-out": fans_out,
}  # fmt: skip
FORMS = (*MEASURES, "streams")


async def use(form: str, number: int, address: str, port: int) -> Told:
    """Connect, and measure."""
    client = Client(SETTINGS.get(form), address, port)
    try:
        return await MEASURES[form](client, number)
    finally:
        await client.close()


# Streams


async def serve_streams(address: str, port: int) -> None:
    """Serve until all clients have gone."""
    clients = 0
    done = asyncio.Event()

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        nonlocal clients
        clients += 1
        while await reader.readline():
            writer.write(json.dumps(held()).encode() + b"\n")
            await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        clients -= 1
        if not clients:
            done.set()

    async with await aiordma.start_server(answer, address, port):
        await done.wait()


async def use_streams(number: int, address: str, port: int) -> Told:
    """Open them, and measure their memory."""
    streams: list[tuple[StreamReader, StreamWriter]] = []
    points: list[tuple[Told, Told]] = []
    for count in (FEW, FEW + number):
        while len(streams) < count:
            more = min(AT_ONCE, count - len(streams))
            streams += await asyncio.gather(
                *(aiordma.open_connection(address, port) for _ in range(more))
            )
        await asyncio.sleep(SETTLE_S)
        reader, writer = streams[0]
        writer.write(b"held\n")
        await writer.drain()
        points.append((held(), json.loads(await reader.readline())))
    for _, writer in streams:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in streams))
    few, many = points
    return each(few, many, number)


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, form, number, loop, _over, address, port = words
    to = (address, int(port))
    if form in ("memory", "streams") and ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise OSError("prctl failed")

    async def end() -> None:
        if role == "server":
            await (serve_streams(*to) if form == "streams" else serve(form, *to))
            return
        streams = form == "streams"
        told = use_streams(int(number), *to) if streams else use(form, int(number), *to)
        print(json.dumps(await told))

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(end())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
