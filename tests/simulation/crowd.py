"""Crowds: many clients connect to one address at once, and some give up when others are first."""

from __future__ import annotations

import asyncio

import aiordma
from tests.simulation.common import ADDRESS, BROKEN, connected, count_of, is_broken, unless_broken
from tests.simulation.world import World

__all__ = ["crowd"]


async def crowd(world: World) -> None:
    """Each connect ends in its bound, whichever of the others are canceled, and when."""
    served: set[int] = set()
    racing: list[asyncio.Task[None]] = []

    async def handler(connection: aiordma.Connection) -> None:
        async for message in connection:
            served.add(int(bytes(message)))
            await connection.send(message)

    async def client(number: int, port: int) -> None:
        with unless_broken(world):
            async with connected(world, port) as connection:
                # Who is first ends others, as where the fastest of some wins.
                while racing and world.draw("ends", 2):
                    racing.pop(0).cancel()
                await connection.send(b"%d" % number)
                with await world.within(world.patience, "recv()", connection.recv()) as answer:
                    assert int(bytes(answer)) == number, "an answer is another client's"

    async def patient(number: int, port: int) -> None:
        await asyncio.sleep(world.draw("begins", 3) / 1000)
        await client(number, port)
        world.check(world.may_break or number in served, "a client was served by nobody")

    async def impatient(number: int, port: int) -> None:
        task = asyncio.create_task(client(number, port))
        racing.append(task)
        try:
            await task
        except asyncio.CancelledError:
            pass
        except BROKEN as error:
            if not world.may_break or not is_broken(world, error):
                raise

    async with aiordma.serve(handler, ADDRESS, 0) as server, asyncio.TaskGroup() as tasks:
        for number in range(count_of(world, "clients", 24)):
            kind = impatient if world.once_in("impatient", 3) else patient
            tasks.create_task(kind(number, server.port))
