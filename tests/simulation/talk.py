"""Two ends that talk at the same time, and end in every way that there is, at any moment.

Each end has tasks that send and one that receives.  It ends by one of `_ENDS`.  What is said is
kept in a ledger for each direction, and in the end both ledgers are judged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiordma
from tests.simulation.common import (
    ADDRESS,
    BROKEN,
    connected,
    count_of,
    is_broken,
    pattern,
    settings,
    size_of,
    unless_broken,
)
from tests.simulation.world import World

__all__ = ["talk"]

#: How a side ends: the handler returns, or the block is left; close() while tasks still work;
#: send_eof(), and then the end of the peer; abort(); an exception; a canceled task.
_ENDS = ("leave", "leave", "eof", "eof", "close", "abort", "raise", "cancel")
#: Bytes of the numbers at the beginning of a message, and of a message that fits into any slot.
_SIZE, _SMALL = 32, 300


class _OwnError(Exception):
    """What a program raises by itself."""


@dataclass
class _Ledger:
    """What one side has said, and what the other one has heard.

    Attributes:
        said: for each task that sends, the numbers of messages whose send() has returned.
        began: the same, of all that were tried.
        flushed: the number of messages of each task that a flush() has vouched for.
        heard: for each task, the numbers in the order in which they arrived.
        calls: how many messages were tried, of all tasks.
        small: the numbers of the calls of those heard that fit into any slot, as they arrived.
        ended: whether the peer has heard the end of all messages.
        heard_all: whether the peer has received until it was told of an end.
    """

    said: dict[int, list[int]] = field(default_factory=dict)
    began: dict[int, list[int]] = field(default_factory=dict)
    flushed: dict[int, int] = field(default_factory=dict)
    heard: dict[int, list[int]] = field(default_factory=dict)
    calls: int = 0
    small: list[int] = field(default_factory=list)
    ended: bool = False
    heard_all: bool = False


class _End:
    """One end of a connection."""

    def __init__(self, world: World, number: int, out: _Ledger, into: _Ledger) -> None:
        self.world = world
        self.number = number
        self.out = out
        self.into = into
        self.end = world.one_of("end", _ENDS)
        #: Whether this side has ended the connection other than by its end of messages, and how.
        self.closed = self.aborted = False
        self.peer: _End
        self.patience = world.patience

    async def run(self, connection: aiordma.Connection) -> None:
        """Talk until the end of this side."""
        world = self.world
        tasks = count_of(world, "tasks", 3)
        counts = [world.draw("messages", 8) for _ in range(tasks)]
        try:
            async with asyncio.TaskGroup() as group:
                into = not world.once_in("two hear", 3)
                hearing = [group.create_task(self.hear(connection, into=into))]
                if not into:
                    hearing.append(group.create_task(self.hear(connection, into=False)))
                saying = [
                    group.create_task(self.say(connection, task, count))
                    for task, count in enumerate(counts)
                ]
                if self.end in {"leave", "eof"}:
                    await asyncio.wait(saying)
                else:
                    await asyncio.sleep(world.draw("moment", 100) / 20_000)
                await self.ended(connection, hearing, [*hearing, *saying])
        except* _OwnError:
            raise _OwnError from None

    async def ended(
        self,
        connection: aiordma.Connection,
        hearing: list[asyncio.Task[None]],
        tasks: list[asyncio.Task[None]],
    ) -> None:
        world = self.world
        if self.end == "eof":
            await self.say_eof(connection)
            await asyncio.wait(hearing)
            return
        if self.end == "leave":
            # The peer ends, or this side is tired of it.
            await asyncio.wait(hearing, timeout=world.draw("listens", 20) / 1000)
        elif self.end == "abort":
            self.aborted = True
            connection.abort()
        elif self.end == "raise":
            self.aborted = True
            raise _OwnError
        elif self.end == "cancel":
            for task in tasks:
                task.cancel()
        self.closed = True
        if self.end == "close" and world.draw("close alone", 2):
            await self.bounded(15, "close()", connection.close())
        for task in tasks:
            task.cancel()

    async def bounded(self, seconds: float, what: str, call: Coroutine[Any, Any, Any]) -> Any:
        limit = max(seconds, self.world.patience) if self.world.may_delay else seconds
        return await self.world.within(lambda: limit + self.leisure, what, call)

    @property
    def leisure(self) -> float:
        """What a call may take in addition, as the connection ends."""
        if self.closed and self.peer.closed:
            # Each side waits for what the other one has not read, and will not: close_timeout_s.
            return 5
        # What was sent may have arrived, and its acknowledgment not.
        return 1 if self.peer.closed or self.peer.aborted else 0

    async def say_eof(self, connection: aiordma.Connection) -> None:
        try:
            await self.bounded(self.slow, "send_eof()", connection.send_eof())
        except BROKEN as error:
            self.judge(error, "send_eof()")
            world = self.world
            # A peer that has closed in good order, having heard everything, has no use for it.
            world.check(
                # Where packets get lost, the adapter may not know what has arrived.
                world.may_delay or self.peer.aborted or not self.all_heard(),
                f"send_eof() has raised {error!r}, and all has arrived",
            )

    def all_heard(self) -> bool:
        """Whether the peer has heard all that this side has tried to say."""
        heard = self.out.heard
        return all(set(began) <= set(heard.get(task, ())) for task, began in self.out.began.items())

    @property
    def slow(self) -> float:
        """What a call may take that waits for the peer's program: it may sleep."""
        return self.world.patience + (5 if self.world.may_delay else 0.5)

    def judge(self, error: BaseException, what: str) -> None:
        """An error has to have a cause: this side's end, the peer's, or a fault."""
        world = self.world
        if world.may_break:
            world.check(is_broken(world, error), f"{what} has raised {error!r}")
            return
        if isinstance(error, aiordma.ResourceClosedError):
            # Of a server that stops, too.
            world.check(self.closed or self.aborted or self.end == "eof", f"{what}: {error!r}")
        else:
            peer = self.peer.closed or self.peer.aborted
            told = isinstance(error, aiordma.ConnectionLostError) and is_broken(world, error)
            world.check(told and (peer or self.aborted), f"{what} has raised {error!r}")

    async def say(self, connection: aiordma.Connection, task: int, count: int) -> None:
        """Send some messages, in order; now and then with a flush, or a canceled send."""
        world, out = self.world, self.out
        said = out.said.setdefault(task, [])
        began = out.began.setdefault(task, [])
        for index in range(count):
            data = self.message(task, index)
            began.append(index)
            try:
                if world.once_in("canceled send", 8):
                    async with asyncio.timeout(world.draw("send until", 20) / 100_000):
                        await connection.send(data)
                else:
                    await self.bounded(self.slow, "send()", connection.send(data))
            except TimeoutError as error:
                if isinstance(error, aiordma.RdmaError):
                    self.judge(error, "send()")
                    return
                continue
            except BROKEN as error:
                self.judge(error, "send()")
                return
            said.append(index)
            if world.once_in("flush", 4):
                sent = {each: list(numbers) for each, numbers in out.said.items()}
                try:
                    await self.bounded(self.slow, "flush()", connection.flush())
                except BROKEN as error:
                    self.judge(error, "flush()")
                    world.check(
                        world.may_delay or self.closed or self.peer.aborted or not self.all_heard(),
                        f"flush() has raised {error!r}, and all has arrived",
                    )
                    return
                for each, numbers in sent.items():
                    out.flushed[each] = max(out.flushed.get(each, 0), len(numbers))
            if world.once_in("pause", 5):
                await asyncio.sleep(world.draw("pause", 100) / 10_000)

    def message(self, task: int, index: int) -> bytes:
        self.out.calls += 1
        head = b"%8d%8d%8d%8d" % (self.number, task, index, self.out.calls)
        return head + pattern(self.number << 40 | task << 32 | index, size_of(self.world))

    async def hear(self, connection: aiordma.Connection, *, into: bool) -> None:
        """Receive, at the pace of the seed's, until an end."""
        world, ledger = self.world, self.into
        buffer = bytearray(1_200_000)
        kept: list[aiordma.Message] = []
        while True:
            try:
                if into and world.once_in("recv_into", 5):
                    call = self.bounded(self.slow, "recv_into()", connection.recv_into(buffer))
                    self.take(memoryview(buffer)[: await call])
                else:
                    message = await self.bounded(self.slow, "recv()", connection.recv())
                    self.take(memoryview(message))
                    if world.once_in("kept", 3):
                        kept.append(message)
                    else:
                        message.release()
            except aiordma.ConnectionEndedError:
                ledger.ended = ledger.heard_all = True
                break
            except BROKEN as error:
                ledger.heard_all |= not (self.closed or self.aborted)
                self.judge(error, "recv()")
                break
            if len(kept) > 3:
                kept.pop(0).release()
            if world.once_in("slow", 6):
                await asyncio.sleep(world.draw("slow for", 50) / 10_000)

    def take(self, data: memoryview) -> None:
        number, task, index, call = (int(bytes(data[at : at + 8])) for at in (0, 8, 16, 24))
        check = self.world.check
        check(number == self.peer.number, "a message is another connection's")
        body = pattern(number << 40 | task << 32 | index, len(data) - _SIZE)
        check(data[_SIZE:] == body, "a message has other bytes than were sent")
        self.into.heard.setdefault(task, []).append(index)
        if len(data) < _SMALL:
            self.into.small.append(call)


def _judge(world: World, ledger: _Ledger, speaker: _End, listener: _End) -> None:
    """Whether what was heard is what was said."""
    for task, heard in ledger.heard.items():
        who = f"task {task} of {speaker.number}"
        began, said = ledger.began.get(task, []), ledger.said.get(task, [])
        world.check(heard == sorted(set(heard)), f"{who}: heard {heard}, twice or in disorder")
        world.check(set(heard) <= set(began), f"{who}: heard {heard}, said {began}")
        if heard:
            lost = [index for index in said if index < heard[-1] and index not in heard]
            world.check(not lost, f"{who}: {lost} were lost between others")
    in_order = ledger.small == sorted(ledger.small)
    world.check(in_order, f"messages of several tasks in another order: {ledger.small}")
    for task, said in ledger.said.items():
        who = f"task {task} of {speaker.number}"
        lost = sorted(set(said) - set(ledger.heard.get(task, ())))
        if ledger.ended:
            world.check(not lost, f"{who}: {lost} were lost before the end")
        # Not behind a large message that the peer could not read any more.
        elif ledger.heard_all and ledger.said == ledger.began and not world.may_break:
            flushed = said[: ledger.flushed.get(task, 0)]
            lost = [index for index in lost if index in flushed]
            world.check(not lost, f"{who}: {lost} were lost after a flush()")
    quiet = not (world.may_break or speaker.aborted or listener.aborted or listener.closed)
    # Who leaves in good order has said everything, and a peer that listens hears it.
    if quiet and ledger.heard_all:
        world.check(ledger.ended, f"{speaker.number} has left, and its peer heard of no end")


async def talk(world: World) -> None:
    """Clients and a server that talk at once, and end in every way, at any moment."""
    ends: dict[int, tuple[_End, _End]] = {}
    world.leisure = 8.0
    world.may_log = "_OwnError", "the server stops, and waits"

    async def handler(connection: aiordma.Connection) -> None:
        first = await connection.recv()
        with first:
            number = int(bytes(first))
        with contextlib.suppress(*BROKEN):
            await connection.send(b"go")
        await ends[number][1].run(connection)

    async def client(number: int, port: int) -> None:
        await asyncio.sleep(world.draw("begins", 20) / 10_000)
        there, back = _Ledger(), _Ledger()
        near = _End(world, number, there, back)
        far = _End(world, 100 + number, back, there)
        near.peer, far.peer = far, near
        ends[number] = near, far
        try:
            with unless_broken(world):
                async with connected(world, port) as connection:
                    await connection.send(b"%d" % number)
                    (await connection.recv()).release()
                    await near.run(connection)
        except _OwnError:
            pass
        except BROKEN as error:
            # The server has stopped.
            if not stopping.is_set() or not is_broken(world, error):
                raise

    stopping = asyncio.Event()
    config = settings(world)
    grace_s = world.one_of("grace", (5.0, 5.0, 0.01))
    clients = count_of(world, "clients", 3)
    async with (
        asyncio.TaskGroup() as tasks,
        aiordma.serve(handler, ADDRESS, 0, config=config, grace_s=grace_s) as server,
    ):
        running = [tasks.create_task(client(1 + number, server.port)) for number in range(clients)]
        early = world.once_in("stops early", 6)
        await asyncio.wait(running, timeout=world.draw("stops", 30) / 1000 if early else None)
        stopping.set()
        if early:
            for _, far in ends.values():
                far.closed = far.aborted = True  # its handler may be canceled
        # Handlers have their time to end; the connections have theirs, to close.
        bound = world.patience + 40
        await world.within(bound, "stop()", server.stop())
    for near, far in ends.values():
        _judge(world, near.out, near, far)
        _judge(world, far.out, far, near)
