"""What the systems share: addresses, sizes, settings, and which errors a fault may have."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from typing import Any, TypeVar

import aiordma
from tests.simulation.world import World

__all__ = [
    "ADDRESS",
    "BROKEN",
    "OTHER",
    "PORT",
    "connected",
    "count_of",
    "is_broken",
    "pattern",
    "settings",
    "size_of",
    "unheard",
    "unless_broken",
    "within_turns",
]

T = TypeVar("T")

#: Of the first adapter, on which servers listen.
ADDRESS = "127.0.0.1"
#: Of the second one, from which some of the clients connect.
OTHER = "127.0.0.2"
#: Of a server that comes again where it was, and of those beside it.  Below the ports that the
#: kernel chooses: among those a client may take the port of a server that is away.
PORT = 7471
#: What a call may raise when the wire loses packets for long, or the peer ends.
BROKEN = (aiordma.RdmaError, ConnectionError, TimeoutError, asyncio.IncompleteReadError)
#: For what the program has closed, which a client that is still at work has not.
_OWN = aiordma.ResourceClosedError


@contextlib.contextmanager
def unless_broken(world: World) -> Iterator[None]:
    """A client may be told that its connection broke, where a fault may break it."""
    try:
        yield
    except BaseException as error:
        if not world.may_break or not is_broken(world, error):
            raise
        world.check(not _is_own(error), f"what was lost counts as closed by the program: {error!r}")
        world.note(f"broken: {type(error).__name__}")


def _is_own(error: BaseException) -> bool:
    """Whether it tells that the program itself has closed something."""
    if isinstance(error, BaseExceptionGroup):
        return any(_is_own(each) for each in error.exceptions)
    return isinstance(error, _OWN)


def is_broken(world: World, error: BaseException) -> bool:
    """Whether it is one of the errors that a program has to expect."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_broken(world, each) for each in error.exceptions)
    return isinstance(error, BROKEN) and (world.may_violate or not _is_wrong(error))


def _is_wrong(error: BaseException) -> bool:
    """Whether no fault excuses it: it tells that the library itself did something wrong."""
    damaged = isinstance(error, aiordma.ConnectionLostError) and error.errno == errno.EBADMSG
    if isinstance(error, aiordma.RequestRefusedError):
        return error.try_again
    return damaged or isinstance(error, aiordma.ProtocolError)


#: Bytes without a period: what lands in another place is noticed.
_BYTES = random.Random(1).randbytes(4_000_000)


def unheard(task: asyncio.Task[Any]) -> None:
    """The error of a task may stay unread, where the run ends before: asyncio would report it."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


def pattern(seed: int, size: int) -> bytes:
    """Bytes of a message, which no other message has."""
    begin = seed * 7919 % (len(_BYTES) - size)
    return (seed.to_bytes(8, "little") * 2 + _BYTES[begin : begin + size])[:size]


def count_of(world: World, name: str, most: int) -> int:
    """How many there are of something, from 1."""
    return 1 + world.draw(name, most)


#: Bytes of messages: small ones, those around the bounds of a slot, of fragments, of a landing and
#: of a copy, and those that the peer reads.
_SIZES = (200, 200, 200, 200, 7_000, 30_000, 70_000, 300_000, 1_100_000)


def size_of(world: World, name: str = "size") -> int:
    """A size of a message."""
    kind = world.draw(name, len(_SIZES))
    return world.draw(f"{name} {kind}", _SIZES[kind])


def settings(world: World) -> aiordma.ConnectionConfig:
    """Settings of a connection: mostly the defaults, or small numbers that run out often."""
    kind = world.draw("settings", 6)
    if kind < 3:
        return aiordma.ConnectionConfig()
    if kind == 3:
        depth = world.one_of("recv_depth", (2, 3))
        return aiordma.ConnectionConfig(recv_depth=depth, send_depth=1, rendezvous_window=1)
    numbers = {
        "recv_depth": 2 + world.draw("recv_depth", 8),
        "send_depth": 1 + world.draw("send_depth", 6),
        "rendezvous_window": 1 + world.draw("rendezvous_window", 3),
        "one_sided_depth": 1 + world.draw("one_sided_depth", 8),
        "slot_size": 5888 >> world.draw("slot_size", 5),
        "receive_buffer_size": 1 << 23 - world.draw("receive_buffer", 8),
    }
    return aiordma.ConnectionConfig(
        **numbers,  # type: ignore[arg-type]
        rendezvous_threshold=world.one_of("threshold", (1 << 20, 0, 1 << 14)),
        shared_queues=not world.draw("own queues", 2),
        registration_cache_size=world.one_of("cache", (0, 1 << 20)),
    )


@contextlib.asynccontextmanager
async def connected(
    world: World, port: int, config: aiordma.ConnectionConfig | None = None
) -> AsyncIterator[aiordma.Connection]:
    """A connection to the server, from either adapter; its beginning and its end are bounded."""
    source = world.one_of("other adapter", (None, (OTHER, 0)))
    config = config or settings(world)
    opening = _made(aiordma.connect(ADDRESS, port, local_addr=source, config=config))
    # Its own limit, and a while behind others that get no answer.
    bound = 15 if world.may_delay else world.patience
    connection = await world.within(bound, "connect()", opening)
    failed = True
    try:
        yield connection
        failed = False
    finally:
        if failed:
            connection.abort()
        # Of a connection that is over, nothing is said any more; but what was sent before may be
        # on its way, and the answer to a disconnection, for a second each.
        leisure = 2.0 if connection.is_closing() else world.leisure
        bound = max(15.0, world.patience) if world.may_delay else world.patience + leisure
        await world.within(bound, "close()", connection.close())


async def _made(opening: Awaitable[aiordma.Connection]) -> aiordma.Connection:
    return await opening


async def within_turns(turns: int, call: Coroutine[Any, Any, T]) -> T | None:
    """Await a call that is canceled after so many turns of the loop; None if it was."""
    task = asyncio.ensure_future(call)
    try:
        for _ in range(turns):
            if not task.done():
                await asyncio.sleep(0)
    finally:
        task.cancel()
        await asyncio.wait([task])
    return None if task.cancelled() else task.result()
