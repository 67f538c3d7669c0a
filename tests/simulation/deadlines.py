"""Deadlines: requests by the hundred, each of which has to end in time."""

from __future__ import annotations

import asyncio

import aiordma
from tests.simulation.common import ADDRESS, connected, count_of, pattern, unless_broken
from tests.simulation.world import World

__all__ = ["deadlines"]


async def deadlines(world: World) -> None:
    """Clients that come and go, and ask a slow server with ever shorter deadlines."""
    world.may_log = ("the server stops, and waits",)

    in_time: set[bytes] = set()

    async def handle(request: aiordma.Request) -> None:
        await asyncio.sleep(world.draw("slow", 4000) / 1000)
        body = bytes(request.body)
        await request.reply(body)
        await asyncio.sleep(0)  # what one turn sends is posted at its end
        left = request.remaining
        if left and not request.canceled:
            in_time.add(body)
            if world.once_in("blocks", 8):
                # The answer arrives, and its client cannot look before the deadline.
                world.block(left + 0.1)

    async def ask(connection: aiordma.Connection, body: bytes, seconds: float) -> None:
        call = connection.request(body, timeout=seconds)
        try:
            answer = await world.within(seconds + world.patience, "request()", call)
        except aiordma.RequestDeadlineError:
            late = body not in in_time
            # With few completions in each turn it may wait behind others.
            world.check(
                late or world.may_delay or world.takes_little,
                "an answer that was here in time was thrown away",
            )
            return
        with answer:
            assert bytes(answer) == body, "an answer is another request's"

    async def client(number: int, port: int) -> None:
        await asyncio.sleep(world.draw("begins", 1000) / 1000)
        with unless_broken(world):
            async with connected(world, port) as connection, asyncio.TaskGroup() as tasks:
                seconds = 0.1 + world.draw("seconds", 6000) / 1000
                calls = []
                for index in range(count_of(world, "calls", 24)):
                    body = pattern(number << 32 | index, 16)
                    calls.append(tasks.create_task(ask(connection, body, seconds)))
                    await asyncio.sleep(0)
                    seconds *= world.one_of("shorter", (0.99, 1.0, 0.95))
                if world.once_in("leaves early", 2):
                    await asyncio.sleep(world.draw("leaves", 1000) / 1000)
                    for call in calls:
                        call.cancel()

    async with (
        aiordma.serve_requests(handle, ADDRESS, 0, limit=world.one_of("limit", (1, 3))) as server,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(count_of(world, "clients", 12)):
            tasks.create_task(client(number, server.port))
