"""Blocked: a program that blocks its loop for seconds, and events that get lost."""

from __future__ import annotations

import asyncio
import contextlib

import aiordma
from tests.simulation.common import ADDRESS, BROKEN, connected, count_of, unless_broken
from tests.simulation.world import World

__all__ = ["blocked"]

#: Seconds until completions without an event are found: while others come, and after a rest.
_FOUND_S, _FOUND_IDLE_S = 1.05, 4.05
#: Seconds between two messages, and until the library knows that there are messages again.
_PAUSE_S, _KNOWN_S = 0.05, 5.0


async def blocked(world: World) -> None:
    """A client that asks and rests, blocks its loop, or loses events: it soon has its answer."""
    lost = 0
    judges = not (world.may_delay or world.may_lose_events)
    loses = world.draw("loses", 2)
    world.may_lose_events |= bool(loses)

    async def handler(connection: aiordma.Connection) -> None:
        with contextlib.suppress(*BROKEN):
            async for message in connection:
                await connection.send(message)

    async def client(port: int) -> None:
        async with connected(world, port) as connection:
            for _ in range(count_of(world, "rests", 3)):
                await asyncio.sleep(world.one_of("rest", (0, 1, 10, 20)))
                await ask(connection, world.one_of("asks", (3, 20, 110)))

    async def ask(connection: aiordma.Connection, times: int) -> None:
        nonlocal lost
        late, lost, began = 0, 0, world.now
        for turn in range(times + 10 * loses):
            if loses and turn == times:
                lost = count_of(world, "lost", 3)
                world.fabric.fabric_fault(b"completion event", 0, lost, 0)
            late += await exchange(connection, began)
            await asyncio.sleep(_PAUSE_S)
        if judges:
            world.check(late <= lost, f"{lost} events were lost, and {late} answers came late")

    async def exchange(connection: aiordma.Connection, began: float) -> bool:
        """Whether the answer has come late."""
        asked, bound = world.now, world.patience
        data = b"%.9f" % asked
        if lost:
            bound += lost * (_FOUND_S if asked - began > _KNOWN_S else _FOUND_IDLE_S)
        await world.within(bound, "send()", connection.send(data))
        if not loses and world.once_in("blocks", 5):
            seconds = world.draw("blocks for", 40) / 10
            world.block(seconds)
            asked += seconds
        with await world.within(bound, "recv()", connection.recv()) as answer:
            assert bytes(answer) == data, "an answer is not what was sent"
        return world.now - asked > world.patience

    async with aiordma.serve(handler, ADDRESS, 0) as server:
        with unless_broken(world):
            await client(server.port)
