"""A server that passes on what it hears to one listener, whose window is small and soon full.

So tasks of several connections stand in line to send on one, and are resumed, canceled and closed
while others wait behind them.  One may end the event loop, which the program runs again.  What the
listener hears is in the order of the calls of send(), and soon; and its own tasks, which wait for
messages, are served in their order, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import aiordma
from tests.simulation.common import (
    ADDRESS,
    connected,
    count_of,
    is_broken,
    pattern,
    settings,
    size_of,
    unheard,
    unless_broken,
)
from tests.simulation.loop import LoopEnded
from tests.simulation.world import World

__all__ = ["relay"]

#: Bytes of the number at the beginning of a message, and of a message that fits into any slot.
_HEAD, _SMALL = 8, 300
_LISTENS, _HUSH = b"listens", b"hush"


class _Room:
    """What is said to the listener, and what it has heard.

    Attributes:
        called: the numbers of the messages that fit into a slot, in the order of the calls.
        sent: with the number of each message whose send() has returned, when that was.
        refused: those of `called` whose send() was canceled, or given up.
        heard: the numbers that the listener has got.
        turns: the number of the recv() of each of these.
        late: the numbers of those that were heard long after they were sent.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.listener: aiordma.Connection | None = None
        self.listens = asyncio.Event()
        self.called: list[int] = []
        self.sent: dict[int, float] = {}
        self.refused: set[int] = set()
        self.heard: list[int] = []
        self.turns: list[int] = []
        self.late: list[int] = []
        self.bound = world.patience + 0.5
        #: Each message is sent by a task of its own.
        self.crowd = not world.draw("crowd", 3)
        self.sending: list[asyncio.Task[None]] = []
        self.working: set[asyncio.Task[Any]] = set()
        self.receives = 0

    def work(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(what)
        self.working.add(task)
        task.add_done_callback(self.working.discard)
        return task

    def config(self) -> aiordma.ConnectionConfig:
        wait = self.world.one_of("wait", ("event", "event", "spin"))
        return replace(settings(self.world), wait=wait)

    # ---- the server

    async def handler(self, connection: aiordma.Connection) -> None:
        first = await connection.recv()
        with first:
            listens = bytes(first) == _LISTENS
        if listens:
            self.listener = connection
            self.listens.set()
            async for message in connection:
                message.release()
            while self.working:  # the others end before the connection to the listener
                await asyncio.wait(self.working)
        else:
            await self.listens.wait()
            await self.work(self.pass_all_on(connection))

    async def pass_all_on(self, connection: aiordma.Connection) -> None:
        if (listener := self.listener) is None:
            return
        with unless_broken(self.world):
            async for message in connection:
                if bytes(message[: len(_HUSH)]) == _HUSH:
                    message.release()
                    self.hush()
                else:
                    await self.pass_on(listener, message)

    async def pass_on(self, listener: aiordma.Connection, message: aiordma.Message) -> None:
        """Send a message to the listener: here, in a task, or by a coroutine that is given up."""
        how = self.world.draw("passes on", 8)
        if how == 7 and len(message) < _SMALL:
            await self.give_up(listener, message)
        elif how < 4 and not self.crowd:
            await self.send(listener, message)
        else:
            task = self.work(self.send(listener, message, may_end=True))
            unheard(task)
            self.sending.append(task)
            if self.world.once_in("hushed", 3):
                self.work(self.hush_soon(task))

    async def send(
        self, listener: aiordma.Connection, message: aiordma.Message, *, may_end: bool = False
    ) -> None:
        number, is_small = int(bytes(message[:_HEAD])), len(message) < _SMALL
        with message:
            self.called += [number] * is_small
            try:
                call = listener.send(message)
                await self.world.within(self.bound, "send()", call)
            except asyncio.CancelledError:
                self.refused |= {number} if is_small else set()
                raise
        self.sent[number] = self.world.now
        if may_end and self.world.once_in("ends the loop", 6):
            raise LoopEnded

    async def give_up(self, listener: aiordma.Connection, message: aiordma.Message) -> None:
        """Begin a send as a program that drives it by itself, and close it before its end."""
        number = int(bytes(message[:_HEAD]))
        with message, contextlib.closing(listener.send(message)) as call:
            self.called.append(number)
            try:
                call.send(None)
            except StopIteration:
                self.sent[number] = self.world.now
                return
            self.refused.add(number)
            for _ in range(self.world.draw("gives up", 6)):
                await asyncio.sleep(0)

    def hush(self) -> None:
        """Cancel a task that may stand in line."""
        waiting = [task for task in self.sending if not task.done()]
        if waiting:
            waiting[self.world.draw("whom", len(waiting))].cancel()

    async def hush_soon(self, task: asyncio.Task[None]) -> None:
        for _ in range(self.world.draw("hush after", 12)):
            await asyncio.sleep(0)
        task.cancel()

    # ---- the clients

    async def speak(self, number: int, port: int) -> None:
        world = self.world
        with unless_broken(world):
            async with connected(world, port, self.config()) as connection:
                await connection.send(b"speaks")
                many = count_of(world, "messages", 24 if self.crowd else 8)
                for index in range(many):
                    if world.once_in("hushes", 5):
                        await connection.send(_HUSH)
                    small = self.crowd and not world.once_in("large", 8)
                    size = world.draw("small", 200) if small else size_of(world)
                    data = self.message(number << 16 | index, size)
                    await world.within(self.bound, "send()", connection.send(data))
                    if world.once_in("pause", 4):
                        await asyncio.sleep(world.one_of("pause", (0.0001, 0.001, 0, 5)))

    async def listen(self, port: int) -> None:
        world = self.world
        config = self.config()
        if self.crowd:
            config = replace(config, recv_depth=world.one_of("window", (4, 8, 2)))
        try:
            with unless_broken(world):
                async with connected(world, port, config) as connection:
                    await connection.send(_LISTENS)
                    await asyncio.sleep(world.draw("late", 3) / 20)
                    async with asyncio.TaskGroup() as tasks:
                        for _ in range(count_of(world, "takers", 3)):
                            tasks.create_task(self.take_all(connection))
        finally:
            self.listens.set()

    async def take_all(self, connection: aiordma.Connection) -> None:
        """Receive until the end; some of the waits are canceled, and take no message."""
        world = self.world
        with contextlib.suppress(aiordma.ConnectionEndedError):
            while True:
                self.receives += 1
                call = asyncio.create_task(self.take(connection, self.receives))
                if world.once_in("canceled recv", 3):
                    self.work(self.hush_soon(call))
                try:
                    await asyncio.wait([call])
                finally:
                    call.cancel()
                if not call.cancelled():
                    call.result()
                if world.once_in("slow", 3):
                    await asyncio.sleep(world.draw("slow for", 20) / 10_000)

    async def take(self, connection: aiordma.Connection, turn: int) -> None:
        with await connection.recv() as message:
            number = int(bytes(message[:_HEAD]))
            good = bytes(message) == self.message(number, len(message) - _HEAD)
            self.world.check(good, "a message has other bytes than were sent")
        if self.world.now - self.sent.get(number, self.world.now) > self.bound:
            self.late.append(number)
        self.heard.append(number)
        self.turns.append(turn)

    def message(self, number: int, size: int) -> bytes:
        return b"%8d" % number + pattern(number, size)

    # ---- what must hold

    def judge(self) -> None:
        check, heard = self.world.check, self.heard
        check(len(heard) == len(set(heard)), f"messages were heard twice: {heard}")
        called = [number for number in self.called if number in heard]
        order = [number for number in heard if number in self.called]
        check(called == order, f"heard in another order, {order}, than sent, {called}")
        came = sorted(self.refused & set(heard))
        check(not came, f"messages were heard whose send() was canceled: {came}")
        check(self.turns == sorted(self.turns), f"the order of those that wait: {self.turns}")
        check(not self.late, f"messages were heard late: {self.late}")
        lost = sorted(self.sent.keys() - set(heard))
        check(self.world.may_break or not lost, f"messages were lost: {lost}")
        for task in self.sending:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, LoopEnded):
                continue
            broken = error and self.world.may_break and is_broken(self.world, error)
            check(not error or broken, f"send() has raised {error!r}")


async def relay(world: World) -> None:
    """Speakers, whom a server passes on to a listener."""
    room = _Room(world)
    world.leisure = 8.0
    world.may_log = ("the server stops, and waits",)
    if world.once_in("loop resumes", 4):  # tasks are then resumed as in a loop that is nested
        vars(asyncio.get_running_loop())["_nest_patched"] = True
    async with (
        asyncio.TaskGroup() as tasks,
        aiordma.serve(room.handler, ADDRESS, 0, config=room.config(), grace_s=100) as server,
    ):
        tasks.create_task(room.listen(server.port))
        speaking = [
            tasks.create_task(room.speak(1 + number, server.port))
            for number in range(count_of(world, "speakers", 3))
        ]
        await asyncio.wait(speaking)
        await room.listens.wait()
        await asyncio.sleep(0 if world.may_delay else 2 * room.bound)  # what is left over is late
        await world.within(world.patience + 40, "stop()", server.stop())
    room.judge()
