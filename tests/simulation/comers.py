"""Clients that come and go at an adapter that is slow to tell what is done.

Completions of connections that are gone arrive when others have their place, or lie in the queue
that all have in common: they are nobody's any more.
"""

from __future__ import annotations

import asyncio

import aiordma
from tests.simulation.common import (
    ADDRESS,
    connected,
    count_of,
    pattern,
    settings,
    unless_broken,
)
from tests.simulation.world import World

__all__ = ["comers"]

_MS = 1_000_000
#: What all the calls of a connection may take where each completion comes late.
_LATE_S = 30.0


async def comers(world: World) -> None:
    """Clients that exchange a few messages with a server, leave, and come again."""
    world.fabric.fabric_set(b"completions_stay", world.draw("stay", 2))
    if late := world.one_of("late", (0, 5, 300, 700, 1500)):
        world.fabric.fabric_set(b"completion_delay_ns", late * _MS)
        world.may_delay = True
        world.patience = max(world.patience, _LATE_S)

    async def handler(connection: aiordma.Connection) -> None:
        async for message in connection:
            with message:
                await connection.send(message)

    async def come(number: int, port: int) -> None:
        with unless_broken(world):
            async with connected(world, port) as connection:
                for index in range(count_of(world, "messages", 4)):
                    data = pattern(number << 16 | index, 8 + world.draw("size", 200))
                    await world.within(world.patience, "send()", connection.send(data))
                    with await world.within(world.patience, "recv()", connection.recv()) as back:
                        assert bytes(back) == data, "an answer is not what was sent"
                if world.once_in("aborts", 3):
                    connection.abort()

    async def come_again(name: int, port: int) -> None:
        for turn in range(count_of(world, "turns", 5)):
            await come(1 + name << 8 | turn, port)
            await asyncio.sleep(world.one_of("rest", (0, 0.001, 0.1, 0.6)))

    async with (
        aiordma.serve(handler, ADDRESS, 0, config=settings(world)) as server,
        asyncio.TaskGroup() as tasks,
    ):
        for name in range(count_of(world, "clients", 3)):
            tasks.create_task(come_again(name, server.port))
