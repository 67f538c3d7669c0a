"""Silence: connections on which little is said.  Who lives is kept, and who is dead is given up."""

from __future__ import annotations

import asyncio
import contextlib

import aiordma
from aiordma.endpoint.wire import FRAME, FrameKind, Hello
from tests.inside.simulated import raw_frames
from tests.simulation.common import ADDRESS, BROKEN, connected, count_of, unless_broken
from tests.simulation.world import World

__all__ = ["silence"]

_SLOT = 1024
#: `keepalive_s` and `idle_timeout_s`.
_TIMES = ((10.0, 30.0), (1.0, 3.0), (60.0, 5.0), (1.0, 2.0), (2.0, 10.0))


class _Program:
    """A program of another make, with some connections; it speaks the protocol, and falls silent.

    Its adapter acknowledges what it gets, all the time.
    """

    def __init__(self, world: World, count: int, asks_every: float) -> None:
        self.world = world
        self.count = count
        self.asks_every = asks_every
        #: Whether the whole program stops, or one of its connections alone is broken.
        self.stops = count == 1 or bool(world.draw("stops", 2))
        #: When that was; 0: not yet.
        self.moment = 0.0
        self.waited = False
        self._hello = Hello(8, 1, _SLOT, 64)

    def is_silent(self, number: int) -> bool:
        """Whether nothing is said on this connection any more."""
        return bool(self.moment) and (self.stops or number == 0)

    async def run(self, port: int, talks: float, waits: float) -> None:
        """Talk for so many seconds, and fall silent; wait until that is noticed, but not longer."""
        tasks = [
            asyncio.create_task(self._connection(number, port)) for number in range(self.count)
        ]
        await asyncio.sleep(talks)
        self.moment = self.world.now
        await asyncio.wait(tasks if self.stops else tasks[:1], timeout=waits)
        self.waited = True
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _connection(self, number: int, port: int) -> None:
        config = aiordma.ConnectionConfig(raw=True, slot_size=_SLOT, recv_depth=32)
        hello = self._hello.pack(56)
        with contextlib.suppress(*BROKEN):
            connection = await aiordma.connect(ADDRESS, port, config=config, private_data=hello)
            asking = None
            try:
                for kind, text in ((FrameKind.CREDIT, b""), (FrameKind.DATA, b"%d" % number)):
                    await connection.send(FRAME.pack(kind, 0, 0, 0, len(text)) + text)
                asking = asyncio.create_task(self._ask(number, connection))
                async for message in connection:
                    if message[0] == FrameKind.PING and not self.is_silent(number):
                        await connection.send(FRAME.pack(FrameKind.PONG, 0, 0, 0, 0))
                    message.release()
            finally:
                if asking is not None:
                    asking.cancel()
                connection.abort()
                await connection.wait_closed()

    async def _ask(self, number: int, connection: aiordma.Connection) -> None:
        """Ask the server for signs of life, as who connects should."""
        with contextlib.suppress(*BROKEN):
            while not self.is_silent(number):
                await connection.send(FRAME.pack(FrameKind.PING, 0, 0, 0, 0))
                await asyncio.sleep(self.asks_every)


async def silence(world: World) -> None:
    """Clients that rest for minutes, a program that falls silent, and a loop that stands still."""
    world.may_log = "the peer ended the connection", "nothing heard"
    # What gets lost is heard late, and short times are over by then.
    patient = world.may_lose_events or world.may_delay
    keepalive, idle = world.one_of("times", _TIMES[: 1 if patient else None])
    config = aiordma.ConnectionConfig(keepalive_s=keepalive, idle_timeout_s=idle)
    look = min(keepalive, idle / 2)
    program = _Program(world, world.one_of("connections", (0, 1, 2, 3, 5)), look)
    # A look later; and half a look, where the accepting side keeps out of the way of the other.
    bound = idle + 1.75 * look + world.patience
    noticed: set[int] = set()
    stands = not (program.count or world.may_delay)

    async def handler(connection: aiordma.Connection) -> None:
        number = -1
        with contextlib.suppress(*BROKEN):
            async for message in connection:
                if len(message) < 8:
                    number = int(bytes(message))
                    message.release()
                else:
                    await connection.send(message)
        if program.is_silent(number) and not program.waited:
            noticed.add(number)

    async def fall_silent(port: int) -> None:
        await program.run(port, 0.1 + world.draw("talks", 40) * look, bound)
        silent = range(program.count if program.stops else 1)
        missing = sorted(set(silent) - noticed)
        world.check(
            world.may_break or not missing,
            f"{missing} said nothing for {bound:.1f} s, and nobody noticed",
        )

    async def good(number: int, port: int) -> None:
        with unless_broken(world):
            async with connected(world, port, config) as connection:
                for index in range(count_of(world, "messages", 4)):
                    data = b"%8d" % (number * 100 + index)
                    await world.within(world.patience, "send()", connection.send(data))
                    call = connection.recv()
                    with await world.within(world.patience, "recv()", call) as back:
                        assert bytes(back) == data, "an answer is not what was sent"
                    # What is under way while the loop stands still is late for the peer, too.
                    if stands and not number and world.draw("stands still", 2):
                        await asyncio.sleep(0.3 + world.draw("works", 20))
                        world.block(1 << world.draw("stands still for", 7))
                    await asyncio.sleep(world.draw("rests", 1 << world.draw("rests up to", 8)))

    async with aiordma.serve(handler, ADDRESS, 0, config=config) as server:
        with raw_frames():
            async with asyncio.TaskGroup() as tasks:
                for number in range(count_of(world, "clients", 3)):
                    tasks.create_task(good(number, server.port))
                if program.count:
                    tasks.create_task(fall_silent(server.port))
