"""The systems that are simulated: a server, its clients, and what must hold for what they say.

Each is a coroutine that has to end within a bound of virtual time, as each of its calls has to.
What a call is told must be true: an answer has the right bytes, in order and once, or the call
raises one of the errors of the documentation.  With faults on the wire a connection may break;
without them nothing may fail.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import aiordma
from tests.simulation import (
    blocked,
    calls,
    comers,
    crowd,
    datagrams,
    deadlines,
    failing_over,
    farewell,
    hostile,
    keys,
    large,
    lending,
    medium,
    native,
    openings,
    operations,
    pools,
    relay,
    returns,
    sharing,
    silence,
    stall,
    streams,
    talk,
    upgrades,
)
from tests.simulation.common import (
    ADDRESS,
    BROKEN,
    connected,
    count_of,
    pattern,
    settings,
    size_of,
    unless_broken,
)
from tests.simulation.world import World

__all__ = ["SYSTEMS", "System"]

System = Callable[[World], Awaitable[None]]


async def echo(world: World) -> None:
    """Messages there and back, of several clients, some of whose waits are canceled."""

    config = settings(world)
    if width := world.one_of("width", (0, 0, 0, 2, 3, 18, 22, 26)):
        config = replace(config, recv_depth=width, slot_size=368)

    async def handler(connection: aiordma.Connection) -> None:
        async for message in connection:
            head = bytes(message[:4])
            if head in {b"busy", b"keep", b"note"}:
                if head != b"keep":
                    message.release()
                if head != b"note":
                    await rested.wait()
                message.release()
            else:
                await connection.send(message)

    rested = asyncio.Event()

    async def busy(connection: aiordma.Connection) -> None:
        """While the server does something else, it takes as many messages as it says."""
        # Credits come back by half a window; in the smallest windows, when there is none left.
        half = max(config.recv_depth // 2, 1)
        drawn = world.draw("noted", 2 * half)
        notes = world.one_of("notes", (0, drawn, half - 1, config.recv_depth - 1))
        for _ in range(notes):
            await asyncio.sleep(world.draw("note pause", 3) / 10_000)
            await world.within(world.patience, "send()", connection.send(b"note"))
        keeps = world.draw("keeps", 2)
        await connection.send(b"keep" if keeps else b"busy")
        most = min(config.recv_depth - min(notes + 1 - keeps, half - 1) - keeps, 40)
        for index in range(most):
            await asyncio.sleep(world.draw("busy pause", 5) / 10_000)
            await world.within(world.patience, "send()", connection.send(b"%d" % index))
        rested.set()
        for index in range(most):
            with await world.within(world.patience, "recv()", connection.recv()) as message:
                assert bytes(message) == b"%d" % index, "an answer is not what was sent"

    async def client(number: int, port: int) -> None:
        with unless_broken(world):
            try:
                await exchange(number, port)
            finally:
                rested.set()

    async def exchange(number: int, port: int) -> None:
        async with connected(world, port) as connection:
            if world.draw("busy", 2):
                await busy(connection)
            async with asyncio.TaskGroup() as tasks:
                sent: asyncio.Queue[bytes] = asyncio.Queue(count_of(world, "ahead", 12))
                count = count_of(world, "messages", 12)
                tasks.create_task(ask(number, connection, sent, count))
                for _ in range(count):
                    await take(connection, sent)

    async def ask(
        number: int, connection: aiordma.Connection, sent: asyncio.Queue[bytes], count: int
    ) -> None:
        for index in range(count):
            data = pattern(number << 32 | index, size_of(world))
            await sent.put(data)
            await world.within(world.patience, "send()", connection.send(data))

    async def take(connection: aiordma.Connection, sent: asyncio.Queue[bytes]) -> None:
        message = None
        while message is None:
            # A wait that is canceled has taken no message.
            limit = 0.0001 if world.once_in("canceled recv", 4) else None
            try:
                async with asyncio.timeout(limit):
                    message = await world.within(world.patience, "recv()", connection.recv())
            except TimeoutError as error:
                if limit is None or isinstance(error, aiordma.RdmaError):
                    raise
        with message:
            assert bytes(message) == sent.get_nowait(), "an answer is not what was sent"

    async with (
        aiordma.serve(handler, ADDRESS, 0, config=config) as server,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(count_of(world, "clients", 4)):
            tasks.create_task(client(number, server.port))


async def requests(world: World) -> None:
    """Requests of several tasks of several clients; each is served once."""
    served: Counter[bytes] = Counter()
    limit = world.one_of("limit", (256, 256, 1, 3))

    async def handle(request: aiordma.Request) -> bytes:
        body = bytes(request.body)
        served[body[:16]] += 1
        if world.once_in("slow", 3):
            await asyncio.sleep(world.draw("sleep", 1000) / 1000)
        if world.once_in("refused", 10):
            raise aiordma.RequestUnknownError
        return body[::-1] * world.one_of("answer", (1, 1, 1, 0, 3))

    async def caller(connection: aiordma.Connection, name: int, count: int) -> None:
        for index in range(count):
            body = pattern(name << 32 | index, 16) + pattern(index, size_of(world) // 4)
            await call(connection, body)

    async def call(connection: aiordma.Connection, body: bytes) -> None:
        rushed = world.once_in("deadline", 6)
        seconds = world.draw("seconds", 300) / 1000 if rushed else 200.0
        # Those before it in line may sleep, too.
        bound = seconds + world.patience if rushed else 60 + world.patience
        coroutine = connection.request(body, timeout=seconds)
        try:
            if world.once_in("canceled request", 8):
                async with asyncio.timeout(world.draw("until", 50) / 10_000):
                    answer = await coroutine
            else:
                answer = await world.within(bound, "request()", coroutine)
        except (aiordma.RequestUnknownError, aiordma.RequestDeadlineError):
            assert rushed or served[body[:16]], "a request was refused that nobody served"
        except TimeoutError as error:
            if isinstance(error, aiordma.RdmaError):
                raise
            return
        else:
            with answer:
                got, one = bytes(answer), body[::-1]
            assert got in {b"", one, one * 3}, "an answer is another request's"
            assert served[body[:16]] == 1, "an answer has come, and nobody was asked"

    async def client(number: int, port: int) -> None:
        with unless_broken(world):
            async with connected(world, port) as connection, asyncio.TaskGroup() as tasks:
                for task in range(count_of(world, "tasks", 6)):
                    name = number << 8 | task
                    count = count_of(world, "calls", 5)
                    tasks.create_task(caller(connection, name, count))

    async with (
        aiordma.serve_requests(
            handle,
            ADDRESS,
            0,
            limit=limit,
            config=settings(world),
            max_concurrent=world.one_of("concurrent", (100, 1, 2)),
        ) as server,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(count_of(world, "clients", 3)):
            tasks.create_task(client(number, server.port))
    assert set(served.values()) <= {1}, "a request was served twice"


async def one_sided(world: World) -> None:
    """READ, WRITE and atomics of several tasks, on memory that the other side has exposed."""
    rows, row = count_of(world, "rows", 16), world.one_of("row", (256, 8, 70_000))
    ended = asyncio.Event()
    table = bytearray(rows * row)
    counter = bytearray(8)

    async def serve(connection: aiordma.Connection) -> None:
        async with (
            connection.expose(table, read=True, write=True) as region,
            connection.expose(counter, read=True, atomic=True) as count,
        ):
            await connection.send(region.to_bytes())
            await connection.send(count.to_bytes())
            (await connection.recv()).release()
        shown = bytes(table), bytes(counter)
        await connection.send(b"over")
        with contextlib.suppress(*BROKEN):
            (await connection.recv()).release()
        world.check(shown == (bytes(table), bytes(counter)), "a peer has written after the lease")
        ended.set()

    async def worker(
        connection: aiordma.Connection, rows_of: aiordma.RemoteRegion, place: int
    ) -> None:
        for turn in range(count_of(world, "turns", 4)):
            data = pattern(place << 16 | turn, row)
            part = rows_of[place * row : (place + 1) * row]
            await world.within(world.patience, "write()", connection.write(part, data))
            back = bytearray(row)
            reading = connection.read(rows_of, back, offset=place * row)
            if world.once_in("canceled read", 6):
                try:
                    async with asyncio.timeout(0.0001):
                        await reading
                except TimeoutError as error:
                    if isinstance(error, aiordma.RdmaError):
                        raise
                    continue
            else:
                await world.within(world.patience, "read()", reading)
            assert back == data, "a READ has not what was written before it"

    async def client(connection: aiordma.Connection) -> None:
        region = aiordma.RemoteRegion.from_bytes(bytes(await connection.recv()))
        count = aiordma.RemoteRegion.from_bytes(bytes(await connection.recv()))
        before: list[int] = []

        async def add(times: int) -> None:
            for _ in range(times):
                call = connection.fetch_add(count, 1)
                before.append(await world.within(world.patience, "fetch_add()", call))
                assert len(set(before)) == len(before), "an atomic has another one's result"

        times = count_of(world, "additions", 6)
        async with asyncio.TaskGroup() as tasks:
            for place in range(rows):
                tasks.create_task(worker(connection, region, place))
            for _ in range(2):
                tasks.create_task(add(times))
        assert sorted(before) == list(range(2 * times)), "an atomic was done twice, or not"
        await connection.send(b"done")
        (await connection.recv()).release()
        # This side has been told, mostly; the adapter refuses whom nobody tells.
        for late in (region, aiordma.RemoteRegion.from_bytes(region.to_bytes(version=1))):
            try:
                await connection.write(late[:8], b"too late")
            except aiordma.RdmaError:
                pass
            else:
                raise AssertionError("memory could be written after its lease")
        async with asyncio.timeout(300 if world.may_break else 10):
            await ended.wait()

    async with aiordma.serve(serve, ADDRESS, 0, config=settings(world)) as server:
        with unless_broken(world):
            async with connected(world, server.port) as connection:
                await client(connection)


SYSTEMS: dict[str, System] = {
    "echo": echo,
    "streams": streams.streams,
    "upgrades": upgrades.upgrades,
    "returns": returns.returns,
    "requests": requests,
    "calls": calls.calls,
    "one_sided": one_sided,
    "talk": talk.talk,
    "pool": pools.pool,
    "lending": lending.lending,
    "failover": failing_over.failover,
    "openings": openings.openings,
    "native": native.native,
    "sharing": sharing.sharing,
    "datagrams": datagrams.datagrams,
    "hostile": hostile.hostile,
    "keys": keys.keys,
    "crowd": crowd.crowd,
    "relay": relay.relay,
    "stall": stall.stall,
    "farewell": farewell.farewell,
    "silence": silence.silence,
    "blocked": blocked.blocked,
    "large": large.large,
    "medium": medium.medium,
    "operations": operations.operations,
    "deadlines": deadlines.deadlines,
    "comers": comers.comers,
}
