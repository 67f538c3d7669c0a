"""A peer that takes nothing for long: tasks wait to send, and give up when their time is over.

Each waits for `stall_timeout_s`, and not for less, and its message is not sent.  A large message
can be released when its send() has ended, although the adapter may still read it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import aiordma
from tests.simulation.common import ADDRESS, connected, count_of, settings, unless_broken
from tests.simulation.world import World

__all__ = ["stall"]

#: Bytes of a message that is not copied before it is sent.
_LARGE = 300_000
#: How exact the difference of two moments is.
_CLOCK_S = 1e-6


class _Line:
    """Tasks of one connection that send to a peer, which takes messages at times."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.limit = world.one_of("stall", (0.3, 0.05, 1.0))
        #: The numbers of the messages, in the order of the calls; and those that were sent.
        self.called: list[int] = []
        self.sent: set[int] = set()
        self.heard: list[int] = []

    async def take(self, connection: aiordma.Connection) -> None:
        """Take some messages, and then none for a while, until the end."""
        world = self.world
        with unless_broken(world):
            await connection.send(bytes(_LARGE))
            await asyncio.sleep(world.draw("first rest", 15) / 10)
            async for message in connection:
                with message:
                    if len(message) < _LARGE:
                        self.heard.append(int(bytes(message)))
                if world.once_in("rests", 6):
                    await asyncio.sleep(world.draw("rest", 15) / 10)

    async def say(self, connection: aiordma.Connection, name: int) -> None:
        world = self.world
        for index in range(count_of(world, "messages", 6)):
            await asyncio.sleep(world.draw("pause", 20) / 50)
            number = name << 8 | index
            self.called.append(number)
            began = world.now
            try:
                call = connection.send(b"%d" % number)
                await world.within(self.limit + world.patience, "send()", call)
            except TimeoutError:
                waited = world.now - began
                world.check(waited > self.limit - _CLOCK_S, f"send() gave up after {waited} s")
                continue
            self.sent.add(number)

    async def give_back(self, connection: aiordma.Connection, message: aiordma.Message) -> None:
        """Send a large message for a while, and release it, whatever became of that."""
        seconds = self.limit * self.world.one_of("gives back for", (0.5, 2, 0.01))
        with message, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                call = connection.send(message)
                await self.world.within(seconds + self.world.patience, "send()", call)

    async def talk(self, connection: aiordma.Connection) -> None:
        message = await connection.recv()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.give_back(connection, message))
            for name in range(count_of(self.world, "tasks", 4)):
                tasks.create_task(self.say(connection, 1 + name))

    def judge(self) -> None:
        check = self.world.check
        called = [number for number in self.called if number in self.heard]
        check(called == self.heard, f"heard {self.heard}, and they were sent as {called}")
        more = sorted(set(self.heard) - self.sent)
        check(self.world.may_break or not more, f"heard, and send() has raised: {more}")
        lost = sorted(self.sent - set(self.heard))
        check(self.world.may_break or not lost, f"messages were lost: {lost}")


async def stall(world: World) -> None:
    """Tasks that send to a peer that takes nothing for long."""
    line = _Line(world)
    world.leisure = 40.0
    world.may_log = ("the server stops, and waits",)
    small = replace(settings(world), recv_depth=2 + world.draw("window", 3))
    small = replace(small, receive_buffer_size=1)  # large messages are not fetched ahead
    config = replace(small, stall_timeout_s=line.limit, close_timeout_s=60, rendezvous_threshold=0)
    async with aiordma.serve(line.take, ADDRESS, 0, config=small) as server:
        with unless_broken(world):
            async with connected(world, server.port, config) as connection:
                await line.talk(connection)
        await world.within(world.patience + 40, "stop()", server.stop())
    line.judge()
