"""Large messages, which the receiver reads out of the sender's memory: their order, room and end.

A run has one connection, and one of `_ACTS`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

import aiordma
from tests.inside.endpoint import limit_fetches
from tests.simulation.common import ADDRESS, BROKEN, OTHER, count_of, pattern, unless_broken
from tests.simulation.world import World

__all__ = ["begun", "large", "pair", "turns"]

T = TypeVar("T")
Pair = tuple[aiordma.Connection, aiordma.Connection]
_KIB = 1 << 10
_MIB = 1 << 20


@contextlib.asynccontextmanager
async def pair(
    world: World, near: aiordma.ConnectionConfig, far: aiordma.ConnectionConfig
) -> AsyncIterator[Pair]:
    """Both ends of a connection."""
    arrived = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def handler(connection: aiordma.Connection) -> None:
        arrived.set_result(connection)
        await over.wait()

    source = world.one_of("other adapter", (None, (OTHER, 0)))
    async with aiordma.serve(handler, ADDRESS, 0, config=far) as server:
        opening = aiordma.connect(ADDRESS, server.port, local_addr=source, config=near)
        async with await opening as connection:
            try:
                yield connection, await asyncio.wait_for(arrived, 30)
            finally:
                over.set()


async def turns(world: World, name: str, most: int) -> None:
    for _ in range(world.draw(name, most)):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def begun(call: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """A call under way; it has ended when the block has."""
    task = asyncio.create_task(call)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()


async def _canceled(world: World, call: Coroutine[Any, Any, None]) -> None:
    """Begin a call, and cancel it after a while."""
    async with begun(call):
        await turns(world, "canceled in", 100)


async def _result(task: asyncio.Task[T]) -> T:
    return await task


async def _received(world: World, far: aiordma.Connection, data: bytes, what: str) -> None:
    with await world.within(world.patience, "recv()", far.recv()) as message:
        assert bytes(message) == data, what


async def _ahead(world: World) -> None:
    """As many messages are read ahead of recv() as there is room for, and one more for each."""
    room = world.one_of("room", (64 * _KIB, 256 * _KIB, _MIB))
    ahead, count = count_of(world, "ahead", 3), count_of(world, "messages", 6)
    taken = world.draw("taken", count + 1)
    near = aiordma.ConnectionConfig(rendezvous_threshold=0)
    far = aiordma.ConnectionConfig(rendezvous_threshold=0, receive_buffer_size=ahead * room)
    bodies = [pattern(number, room - world.draw("less", room // 4)) for number in range(count)]
    what = "a message came in the place of another one"
    async with pair(world, near, far) as (here, there), asyncio.TaskGroup() as tasks:
        sending = [tasks.create_task(here.send(data)) for data in bodies]
        for data in bodies[:taken]:
            if world.once_in("rests", 2):
                await asyncio.sleep(world.patience)
            await _received(world, there, data, what)
        await asyncio.sleep(world.patience)
        sent, least = sum(task.done() for task in sending), min(count, taken + ahead)
        world.check(sent >= least, f"{sent} messages were read, and there is room for {least}")
        # Each has at least three quarters of its room.
        most = taken + ahead * 4 // 3
        world.check(sent <= most, f"{sent} messages were read, and there is room for {most}")
        for data in bodies[taken:]:
            await _received(world, there, data, what)


async def _second_reader(world: World) -> None:
    """A task that waits behind another one gets the large message that is next."""
    config = aiordma.ConnectionConfig(rendezvous_threshold=0, receive_buffer_size=64 * _KIB)
    data = pattern(1, world.one_of("size", (100_000, 200_000, 2 * _MIB)))
    async with pair(world, config, config) as (near, far), asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(far.recv()) for _ in range(2)]
        await turns(world, "before", 30)
        await near.send(b"small")
        await turns(world, "between", world.one_of("between at most", (1, 60)))
        tasks.create_task(near.send(data))
        for reader, expected in zip(readers, (b"small", data), strict=True):
            await asyncio.wait([reader], timeout=world.patience)
            world.check(reader.done(), "a reader in line does not get the message that is there")
            if not reader.done():
                reader.cancel()
                continue
            with reader.result() as message:
                assert bytes(message) == expected, "the readers were not served in order"


async def _in_order(world: World) -> None:
    """Messages of several tasks that are larger than a slot arrive in the order of the calls."""
    config = aiordma.ConnectionConfig(
        rendezvous_window=count_of(world, "window", 2),
        rendezvous_threshold=200 * _KIB,
        receive_buffer_size=world.one_of("buffer", (64 * _KIB, 4 * _MIB)),
    )
    sizes = [world.one_of("size", (10_000, 300_000, 30_000)) for _ in range(8)]
    bodies = [pattern(number, size) for number, size in enumerate(sizes)]
    async with pair(world, config, config) as (near, far), asyncio.TaskGroup() as tasks:
        for data in bodies:
            tasks.create_task(near.send(data))
            await asyncio.sleep(0)
            await turns(world, "between", 4)
        await turns(world, "before", 100)
        for data in bodies:
            await _received(world, far, data, "a message has overtaken a larger one")


async def _left(world: World) -> None:
    """Memory of a recv_into() that was canceled is not written to; the message stays the next."""
    data = pattern(1, 300_000 + world.draw("size", 2 * _MIB))
    config = aiordma.ConnectionConfig(one_sided_depth=2 * count_of(world, "reads", 4))
    buffer = bytearray(len(data))
    async with pair(world, config, config) as (near, far), asyncio.TaskGroup() as tasks:
        tasks.create_task(near.send(data))
        for _ in range(count_of(world, "cancellations", 3)):
            if not await _left_alone(world, far.recv_into(buffer), buffer):
                break
        else:
            await world.within(world.patience, "recv_into()", far.recv_into(buffer))
        assert buffer == data, "a message has other bytes than were sent"


async def _left_alone(world: World, call: Coroutine[Any, Any, int], buffer: bytearray) -> bool:
    """Cancel a call, and see that its memory stays as it is then; whether it was canceled."""
    async with begun(call) as task:
        await turns(world, "canceled in", 200)
        task.cancel()
        try:
            await world.within(world.patience, "a call that was canceled", _result(task))
        except asyncio.CancelledError:
            before = bytes(buffer)
            await asyncio.sleep(world.patience)
            world.check(buffer == before, "memory of a call that was canceled has changed")
            return True
    return False


async def _answers(world: World) -> None:
    """The same of the answer to a request; later requests are answered."""
    size = 300_000 + world.draw("size", 2 * _MIB)

    async def handle(request: aiordma.Request) -> bytes:
        return bytes(request.body) * size

    async with aiordma.serve_requests(handle, ADDRESS, 0) as server:
        source = world.one_of("other adapter", (None, (OTHER, 0)))
        async with await aiordma.connect(ADDRESS, server.port, local_addr=source) as connection:
            buffer = bytearray(size)
            await _left_alone(world, connection.request(b"a", into=buffer), buffer)
            again = connection.request(b"b", into=buffer)
            await world.within(world.patience, "request()", again)
            assert buffer == b"b" * size, "an answer is another request's"


async def _not_announced(world: World) -> None:
    """A buffer is free after the end, although its send() was canceled before its turn."""
    depth = world.one_of("recv_depth", (2, 3))
    config = aiordma.ConnectionConfig(recv_depth=depth)
    buffer = bytearray(pattern(1, 300_000))
    async with pair(world, config, config) as (near, far), asyncio.TaskGroup() as tasks:
        for number in range(5):
            tasks.create_task(near.send(b"%d" % number))
        await turns(world, "before", 100)
        await _canceled(world, near.send(buffer))
        for number in range(5):
            await _received(world, far, b"%d" % number, "messages in another order")
    await asyncio.sleep(world.patience)
    try:
        buffer.append(0)
    except BufferError:
        world.check(False, "the buffer of a send() is in use after the end")


async def _eof(world: World) -> None:
    """send_eof(), which waits for a message that nobody reads, ends with the connection."""
    config = aiordma.ConnectionConfig(receive_buffer_size=64 * _KIB)
    async with pair(world, config, config) as (near, far):
        await _canceled(world, near.send(pattern(1, 2 * _MIB)))
        async with begun(near.send_eof()) as ending:
            await turns(world, "aborted in", 100)
            far.abort()
            with contextlib.suppress(*BROKEN):
                await world.within(1.0 + world.patience, "send_eof()", _result(ending))


async def _hangs(world: World) -> None:
    """A READ that does not go on ends the connection after `FETCH_TIMEOUT_S`."""
    with pytest.MonkeyPatch.context() as patch:
        limit_fetches(patch, 2.0)
        await _hanging(world)


async def _hanging(world: World) -> None:
    far = aiordma.ConnectionConfig(ack_timeout=25, one_sided_depth=2)
    bound = 3.0 + world.patience
    world.may_break = world.may_delay = True
    async with pair(world, aiordma.ConnectionConfig(), far) as (near, there):
        # Each way takes 5 ms, and three READs follow the announcement.
        world.fabric.fabric_set(b"delay_ns", 5_000_000)
        world.fabric.fabric_set(b"delay", 1_000_000)
        data = pattern(1, 3 * _MIB)
        async with begun(near.send(data)), begun(there.recv()) as receiving:
            await asyncio.sleep(0.006 + world.draw("hangs", 25) / 1000)
            until = int((world.now + 60) * 1e9)
            for device in (0, 1):
                world.fabric.fabric_pause(device, until)
            with contextlib.suppress(*BROKEN):
                (await world.within(bound, "recv()", _result(receiving))).release()


_ACTS: tuple[Callable[[World], Awaitable[None]], ...] = (
    _ahead, _second_reader, _in_order, _left, _answers, _not_announced, _eof, _hangs,
)  # fmt: skip


async def large(world: World) -> None:
    """One of the acts."""
    world.may_log = ("the peer ended the connection",)
    with unless_broken(world):
        await world.one_of("act", _ACTS)(world)
