"""The systems that are simulated: a server, its clients, and what must hold for what they say.

Each is a coroutine that has to end within a bound of virtual time.  What a call is told must be
true: an answer has the right bytes, in order and once, or the call raises one of the errors of the
documentation.  With faults on the wire a connection may break; without them nothing may fail.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import aiordma
from tests.simulation.world import World

__all__ = ["SYSTEMS", "System", "is_broken"]

System = Callable[[World], Awaitable[None]]
ADDRESS = "127.0.0.1"
#: What a call may raise when the wire loses packets for long, or the peer ends.
BROKEN = (aiordma.RdmaError, ConnectionError, TimeoutError, asyncio.IncompleteReadError)


@contextlib.contextmanager
def unless_broken(world: World) -> Iterator[None]:
    """A client may be told that its connection broke, where a fault may break it."""
    try:
        yield
    except BaseException as error:
        if not world.may_break or not is_broken(error):
            raise
        world.note(f"broken: {type(error).__name__}")


def is_broken(error: BaseException) -> bool:
    """Whether it is one of the errors that a program has to expect."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_broken, error.exceptions))
    return isinstance(error, BROKEN)


def pattern(seed: int, size: int) -> bytes:
    """Bytes of a message, which no other message has."""
    return (seed.to_bytes(8, "little") * (size // 8 + 1))[:size]


def size_of(world: World) -> int:
    """A size of a message: small, of some frames, or large."""
    kind = world.random.randrange(10)
    if kind < 6:
        return world.random.randrange(200)
    if kind < 9:
        return world.random.randrange(70_000)
    return world.random.randrange(1_500_000)


async def echo(world: World) -> None:
    """Messages there and back, of several clients, some of whose waits are canceled."""

    async def handler(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async def client(number: int, port: int) -> None:
        count = world.random.randrange(1, 12)
        with unless_broken(world):
            await exchange(number, port, count)

    async def exchange(number: int, port: int, count: int) -> None:
        async with aiordma.connect(ADDRESS, port) as connection:
            sent: list[bytes] = []
            for index in range(count):
                data = pattern(number << 32 | index, size_of(world))
                await connection.send(data)
                sent.append(data)
                if world.random.randrange(3):
                    await take(connection, sent)
            while sent:
                await take(connection, sent)

    async def take(connection: aiordma.Connection, sent: list[bytes]) -> None:
        while True:
            try:
                # A wait that is canceled has taken no message.
                async with asyncio.timeout(world.random.choice([None, None, None, 0.0001])):
                    message = await connection.recv()
                break
            except TimeoutError:
                continue
        with message:
            assert bytes(message) == sent[0], "an answer is not what was sent"
        del sent[0]

    async with aiordma.serve(handler, ADDRESS, 0) as server, asyncio.TaskGroup() as tasks:
        for number in range(world.random.randrange(1, 5)):
            tasks.create_task(client(number, server.sockname[1]))


async def streams(world: World) -> None:
    """Bytes there and back over streams, in pieces of any size, with an end of each direction."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*BROKEN):
            while data := await reader.read(world.random.randrange(1, 100_000)):
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        writer.close()
        with contextlib.suppress(*BROKEN):
            await writer.wait_closed()

    async def client(number: int, port: int) -> None:
        with unless_broken(world):
            await exchange(number, port)

    async def exchange(number: int, port: int) -> None:
        total = world.random.choice([1, 1000, 100_000, 700_000])
        data = pattern(number, total)
        reader, writer = await aiordma.open_connection(ADDRESS, port)

        async def write() -> None:
            begin = 0
            while begin < total:
                end = begin + world.random.randrange(1, 80_000)
                writer.write(data[begin:end])
                if world.random.randrange(2):
                    await writer.drain()
                begin = end
            writer.write_eof()

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(write())
                reading = tasks.create_task(reader.read(-1))
        finally:
            writer.close()
        assert reading.result() == data, "a stream has other bytes than were written"
        await writer.wait_closed()

    server = await aiordma.start_server(handler, ADDRESS, 0)
    async with server, asyncio.TaskGroup() as tasks:
        for number in range(world.random.randrange(1, 4)):
            tasks.create_task(client(number, server.port))


async def requests(world: World) -> None:
    """Requests of several tasks of several clients; each is served once."""
    served: Counter[bytes] = Counter()

    async def handle(request: aiordma.Request) -> bytes:
        body = bytes(request.body)
        served[body[:16]] += 1
        if world.random.randrange(3) == 0:
            await asyncio.sleep(world.random.random())
        if world.random.randrange(10) == 0:
            raise aiordma.RequestUnknownError
        return body[::-1]

    async def caller(connection: aiordma.Connection, name: int, count: int) -> None:
        for index in range(count):
            body = pattern(name << 32 | index, 16) + pattern(index, size_of(world) // 4)
            try:
                with await connection.request(body, timeout=200) as answer:
                    assert bytes(answer) == body[::-1], "an answer is another request's"
            except aiordma.RequestUnknownError:
                continue

    async def client(number: int, port: int) -> None:
        with unless_broken(world):
            await exchange(number, port)

    async def exchange(number: int, port: int) -> None:
        async with (
            aiordma.connect(ADDRESS, port) as connection,
            asyncio.TaskGroup() as tasks,
        ):
            for task in range(world.random.randrange(1, 6)):
                name = number << 8 | task
                tasks.create_task(caller(connection, name, world.random.randrange(1, 5)))

    async with aiordma.serve_requests(handle, ADDRESS, 0) as server, asyncio.TaskGroup() as tasks:
        for number in range(world.random.randrange(1, 4)):
            tasks.create_task(client(number, server.sockname[1]))
    assert set(served.values()) <= {1}, "a request was served twice"


async def one_sided(world: World) -> None:
    """READ, WRITE and atomics of several tasks, on memory that the other side has exposed."""
    rows, row = 16, 256
    ended = asyncio.Event()
    table = bytearray(rows * row)
    counter = bytearray(8)
    shown = bytearray()

    async def serve(connection: aiordma.Connection) -> None:
        async with (
            connection.expose(table, read=True, write=True) as region,
            connection.expose(counter, read=True, atomic=True) as count,
        ):
            await connection.send(region.to_bytes())
            await connection.send(count.to_bytes())
            await connection.recv()
        shown[:] = bytes(table)
        ended.set()

    async def worker(
        connection: aiordma.Connection, rows_of: aiordma.RemoteRegion, place: int
    ) -> None:
        for turn in range(world.random.randrange(1, 5)):
            data = pattern(place << 16 | turn, row)
            await connection.write(rows_of[place * row : (place + 1) * row], data)
            back = bytearray(row)
            await connection.read(rows_of, back, offset=place * row)
            assert back == data, "a READ has not what was written before it"

    async def client(connection: aiordma.Connection) -> None:
        region = aiordma.RemoteRegion.from_bytes(bytes(await connection.recv()))
        count = aiordma.RemoteRegion.from_bytes(bytes(await connection.recv()))
        before: list[int] = []

        async def add() -> None:
            before.extend([await connection.fetch_add(count, 1) for _ in range(3)])

        async with asyncio.TaskGroup() as tasks:
            for place in range(rows):
                tasks.create_task(worker(connection, region, place))
            tasks.create_task(add())
            tasks.create_task(add())
        assert sorted(before) == list(range(6)), "an atomic was done twice, or not"
        await connection.send(b"done")
        async with asyncio.timeout(300 if world.may_break else None):
            await ended.wait()

    async with aiordma.serve(serve, ADDRESS, 0) as server:
        with unless_broken(world):
            async with aiordma.connect(ADDRESS, server.sockname[1]) as connection:
                await client(connection)


SYSTEMS: dict[str, System] = {
    "echo": echo,
    "streams": streams,
    "requests": requests,
    "one_sided": one_sided,
}
