"""Openings: a program that listens, closes, and listens again at once; clients that come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import aiordma
from tests.simulation.common import (
    ADDRESS,
    PORT,
    count_of,
    settings,
    unless_broken,
    within_turns,
)
from tests.simulation.world import World

__all__ = ["openings"]

T = TypeVar("T")
#: Bytes that a client exposes: so many are registered in a thread.
_EXPOSED = 1_100_000


class _Place:
    """The program that listens, again and again on one port."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.host = world.one_of("host", (ADDRESS, None))
        self.listens = asyncio.Event()
        self.over = False

    async def run(self) -> None:
        """Listen, close, and listen."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(count_of(self.world, "listeners", 3)):
                    await self.once(tasks)
        finally:
            self.over = True
            self.listens.set()

    async def once(self, tasks: asyncio.TaskGroup) -> None:
        """Be a listener for a while."""
        world = self.world
        # Who has closed a listener can listen at once where it was.
        opening = _awaited(aiordma.listen(self.host, PORT, config=settings(world)))
        listener = await world.within(world.patience, "listen()", opening)
        try:
            self.listens.set()
            if world.once_in("answers requests", 3):
                tasks.create_task(self.answer(listener))
            else:
                for number in range(2):
                    tasks.create_task(self.take(listener, number))
            await asyncio.sleep((1 + world.draw("listens for", 5)) / 1000)
        finally:
            listener.close()
        if world.draw("waits", 2):
            await world.within(world.patience, "wait_closed()", listener.wait_closed())

    async def take(self, listener: aiordma.Listener, number: int) -> None:
        """Greet whom the listener accepts; one of two leaves the line now and then."""
        while True:
            try:
                if number and self.world.draw("leaves the line", 3):
                    turns = self.world.draw("turns in line", 15)
                    connection = await within_turns(turns, listener.accept())
                else:
                    connection = await listener.accept()
            except aiordma.ResourceClosedError:
                return
            if connection is not None:
                with unless_broken(self.world):
                    await self.greet(connection)

    async def greet(self, connection: aiordma.Connection) -> None:
        """Say hello, and close."""
        with _unless_left(self.world):
            await connection.send(b"hello")
        await connection.close()

    async def answer(self, listener: aiordma.Listener) -> None:
        """Answer each request; a second answer is an error of the program, and only that."""
        async for request in listener.requests():
            if self.world.draw("rejects", 2):
                request.reject(b"no")
            else:
                with _unless_left(self.world):
                    await self.greet(await request.accept())
            try:
                if self.world.draw("rejects again", 2):
                    request.reject()
                else:
                    (await request.accept()).abort()
            except aiordma.RdmaOSError:
                continue
            self.world.check(False, "a request was answered twice")


class _Client:
    """Connects, with or without patience."""

    def __init__(self, world: World, place: _Place) -> None:
        self.world = world
        self.place = place
        # What was sent before may be on its way, and the answer to a disconnection, for a second
        # each.
        self.bound = world.patience + 2.0

    async def run(self) -> None:
        """Come again and again, as long as somebody listens."""
        while not self.place.over:
            with unless_broken(self.world), _unless_left(self.world):
                if self.world.once_in("patient", 2):
                    await self.world.within(self.bound, "a visit", self.visit())
                else:
                    await within_turns(self.world.draw("turns", 80), self.visit())
            await asyncio.sleep(self.world.draw("pause", 20) / 5_000)

    async def visit(self) -> None:
        """Connect, and hear the greeting."""
        async with aiordma.connect(ADDRESS, PORT) as connection:
            with await connection.recv() as message:
                assert bytes(message) == b"hello", "a greeting is not what was sent"
            for _ in range(self.world.draw("leases", 3)):
                await within_turns(self.world.draw("turns of a lease", 10), _expose(connection))


async def _expose(connection: aiordma.Connection) -> None:
    async with connection.expose(bytearray(_EXPOSED), read=True) as region:
        assert len(region) == _EXPOSED


@contextlib.contextmanager
def _unless_left(world: World) -> Iterator[None]:
    """The other side may have left in the middle, or its listener be closed."""
    try:
        yield
    except ConnectionError as error:
        # Where packets get lost, a request or its refusal may do so each time.
        if isinstance(error, TimeoutError) and not (world.may_break or world.may_delay):
            raise


async def openings(world: World) -> None:
    """A place that is there again and again, and its visitors."""
    place = _Place(world)
    with unless_broken(world):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(place.run())
            await place.listens.wait()
            for _ in range(count_of(world, "clients", 3)):
                tasks.create_task(_Client(world, place).run())


async def _awaited(opening: Awaitable[T]) -> T:
    return await opening
