"""Sharing: connections with slots out of one pool, which they take, give back and wait for."""

from __future__ import annotations

import asyncio

import aiordma
from tests.simulation.common import ADDRESS, count_of, pattern, unless_broken
from tests.simulation.world import World

__all__ = ["sharing"]

#: Slots that a connection is guaranteed, and messages that it takes ahead if there are more.
_GUARANTEED, _DEPTH = 11, 16
#: Messages that a connection takes ahead which has the pool for itself.
_MOST = 8
_SIZE = 100
#: Messages that a server reads until its connection has as many slots as it can get.
_READS = 6
#: Seconds in which all comes to rest where nothing is late.
_PAUSE_S = 0.25


class _Server:
    """Reads a message of a client when it is told to; the first one says who it is."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.turns = [asyncio.Semaphore(0) for _ in range(3)]
        self.read = [0, 0, 0]

    async def __call__(self, connection: aiordma.Connection) -> None:
        """Read what a client says, one message for each turn."""
        with await connection.recv() as message:
            number = message[0]
        while True:
            await self.turns[number].acquire()
            try:
                message = await connection.recv()
            except aiordma.ResourceClosedError:
                return
            with message:
                data = pattern(number << 32 | self.read[number], _SIZE)
                self.world.check(bytes(message) == data, "a message is not what was sent")
            self.read[number] += 1


class _Client:
    """Says more than the server reads."""

    def __init__(self, world: World, number: int, server: _Server) -> None:
        self.world = world
        self.number = number
        self.server = server
        self.said = 0
        self.is_there, self.begins = asyncio.Event(), asyncio.Event()
        self.leaves = False
        self.task: asyncio.Task[None]

    async def run(self, port: int) -> None:
        """Say as much as is taken."""
        try:
            with unless_broken(self.world):
                async with aiordma.connect(ADDRESS, port) as connection:
                    await connection.send(bytes([self.number]))
                    self.is_there.set()
                    await self.begins.wait()
                    while not self.leaves:
                        await connection.send(pattern(self.number << 32 | self.said, _SIZE))
                        self.said += 1
        finally:
            self.is_there.set()

    @property
    def ahead(self) -> int:
        """Messages that the server has taken, and its program has not read."""
        return self.said - self.server.read[self.number]

    async def grow(self) -> None:
        """Let the server read a few messages: with each it may ask the pool for more slots."""
        for _ in range(_READS):
            self.server.turns[self.number].release()
            await asyncio.sleep(_PAUSE_S)

    def leave(self) -> None:
        """End, as soon as all is read."""
        self.leaves = True
        for _ in range(2 * _DEPTH):
            self.server.turns[self.number].release()


async def sharing(world: World) -> None:
    """Clients that say more than is read: the slots that one leaves are there for the next."""
    server = _Server(world)
    clients = [_Client(world, number, server) for number in range(count_of(world, "clients", 3))]
    # One can take all that is not guaranteed to the others.
    slots = len(clients) * _GUARANTEED + _DEPTH
    config = aiordma.ConnectionConfig(shared_slots=slots, recv_depth=_DEPTH)
    with unless_broken(world):
        async with (
            aiordma.serve(server, ADDRESS, 0, config=config) as serving,
            asyncio.TaskGroup() as tasks,
        ):
            for client in clients:
                client.task = tasks.create_task(client.run(serving.port))
                await client.is_there.wait()
            for client in clients:
                client.begins.set()
                await asyncio.sleep(_PAUSE_S)
                await client.grow()
            *others, last = clients
            before = last.ahead
            for client in others:
                client.leave()
                await asyncio.wait([client.task])
            await asyncio.sleep(_PAUSE_S)
            if not world.may_delay:
                told = f"{before} messages ahead became {last.ahead}: all slots are free"
                world.check(before < last.ahead or before >= _MOST, told)
            last.leave()
