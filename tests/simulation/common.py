"""What the systems share: addresses, sizes, settings, and which errors a fault may have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator

import aiordma
from tests.simulation.world import World

__all__ = [
    "ADDRESS",
    "BROKEN",
    "OTHER",
    "connected",
    "count_of",
    "is_broken",
    "pattern",
    "settings",
    "size_of",
    "unless_broken",
]

#: Of the first adapter, on which servers listen.
ADDRESS = "127.0.0.1"
#: Of the second one, from which some of the clients connect.
OTHER = "127.0.0.2"
#: What a call may raise when the wire loses packets for long, or the peer ends.
BROKEN = (aiordma.RdmaError, ConnectionError, TimeoutError, asyncio.IncompleteReadError)
#: What no fault excuses: they tell that the library itself did something wrong.
_NEVER = (aiordma.ProtocolError, aiordma.MessageDamagedError, aiordma.RequestOverloadedError)


@contextlib.contextmanager
def unless_broken(world: World) -> Iterator[None]:
    """A client may be told that its connection broke, where a fault may break it."""
    try:
        yield
    except BaseException as error:
        if not world.may_break or not is_broken(world, error):
            raise
        world.note(f"broken: {type(error).__name__}")


def is_broken(world: World, error: BaseException) -> bool:
    """Whether it is one of the errors that a program has to expect."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_broken(world, each) for each in error.exceptions)
    return isinstance(error, BROKEN) and (world.may_violate or not isinstance(error, _NEVER))


def pattern(seed: int, size: int) -> bytes:
    """Bytes of a message, which no other message has."""
    return (seed.to_bytes(8, "little") * (size // 8 + 1))[:size]


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
        "initiator_depth": 1 + world.draw("initiator_depth", 3),
        "one_sided_depth": 1 + world.draw("one_sided_depth", 5),
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
async def connected(world: World, port: int) -> AsyncIterator[aiordma.Connection]:
    """A connection to the server, from either adapter; its beginning and its end are bounded."""
    source = world.one_of("other adapter", (None, (OTHER, 0)))
    config = settings(world)
    opening = _made(aiordma.connect(ADDRESS, port, local_addr=source, config=config))
    bound = 12 if world.may_delay else world.patience
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
