"""Calls: requests that race, come too late or are given up, behind limits that are small."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import aiordma
from tests.simulation.common import (
    ADDRESS,
    connected,
    count_of,
    pattern,
    settings,
    unless_broken,
    within_turns,
)
from tests.simulation.world import World

__all__ = ["calls"]

#: What a request asks for, in its first byte; the second has a number for it.
_PLAIN, _SLOW, _LARGE, _FAILS, _GIVES_UP = range(5)
#: Milliseconds of work and of deadlines: often the same, so that ends meet.
_TIMES = (1, 2, 3, 5)
#: Milliseconds of work that a caller does not wait for.
_LONG = 255
#: Bytes of bodies.
_SIZES = (20, 20, 400, 6_000, 20_000)
_HEAD = 10


class _NotFoundError(aiordma.RequestError):
    """What the service tells its clients of."""


def _answer(body: bytes) -> bytes:
    large = body[0] in (_LARGE, _GIVES_UP)
    return pattern(body[2], 1 << 8 + body[1] % 12) if large else body[::-1]


class _Service:
    """Does what each request asks for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.served: Counter[bytes] = Counter()
        self.names = itertools.count()

    async def __call__(self, request: aiordma.Request) -> bytes | None:
        """The handler."""
        self.world.check(request.remaining != 0, "a request is served whose time is over")
        with request.body:
            body = bytes(request.body)
        self.served[body[:_HEAD]] += 1
        kind, number = body[:2]
        if kind == _SLOW:
            await asyncio.sleep(10 if number == _LONG else number / 1000)
        elif kind == _FAILS:
            raise _NotFoundError(body[2:_HEAD].hex())
        elif kind == _GIVES_UP:
            await within_turns(number, request.reply(_answer(body)))
        return None if request.answered else _answer(body)


class _Client:
    """Asks, in one way after the other."""

    def __init__(self, world: World, connection: aiordma.Connection, service: _Service) -> None:
        self.world = world
        self.connection = connection
        self.service = service

    def body(self, kind: int, number: int = 0) -> bytes:
        """A request that no other is like."""
        name = next(self.service.names).to_bytes(_HEAD - 2, "little")
        return bytes((kind, number)) + name + bytes(self.world.one_of("size", _SIZES))

    async def ask(self, body: bytes, **how: Any) -> None:
        """Ask, and look at the answer."""
        into = how.get("into")
        try:
            got = await self.connection.request(body, **how)
        except aiordma.RequestDeadlineError:
            raise
        except aiordma.RequestError as error:
            self.judge(body, error)
            return
        assert self.service.served[body[:_HEAD]] == 1, "an answer has come, and nobody was asked"
        if isinstance(got, int):
            assert into is not None
            data = bytes(into[:got])
        else:
            with got:
                data = bytes(got)
        assert data == _answer(body), "an answer is another request's"
        assert body[0] != _FAILS, "an error became an answer"

    def judge(self, body: bytes, error: aiordma.RequestError) -> None:
        """An error has to be that of the request."""
        if body[0] == _FAILS:
            told = error.remote_type == "_NotFoundError" and error.remote_text
            assert told == body[2:_HEAD].hex(), f"an error is another request's: {error!r}"
        else:
            # An answer whose memory cannot be registered is given up, too.
            given_up = body[0] == _GIVES_UP or self.world.may_break
            assert given_up, f"a request has failed: {error!r}"

    async def plainly(self) -> None:
        """What has to be answered soon, since nobody before it is in the way any more."""
        kind = self.world.one_of("kind", (_PLAIN, _LARGE, _FAILS, _GIVES_UP, _SLOW))
        number = self.world.draw("number", 40)
        await self.world.within(self.world.patience, "request()", self.ask(self.body(kind, number)))

    async def race(self) -> None:
        """Ask for the same several times; the first answer ends the others' tasks."""
        tasks: list[asyncio.Task[None]] = []

        async def runner() -> None:
            kind = self.world.one_of("race of", (_PLAIN, _SLOW))
            number = self.world.one_of("takes", _TIMES)
            await self.ask(self.body(kind, number))
            for task in tasks:
                if task is not asyncio.current_task():
                    task.cancel()

        tasks += [asyncio.create_task(runner()) for _ in range(2 + self.world.draw("runners", 4))]
        await self.world.within(self.world.patience, "the first answer", _all(tasks))

    async def late(self) -> None:
        """Ask with deadlines, some of which are too early."""
        world = self.world
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count_of(world, "limited", 4)):
                takes = world.one_of("takes", (*_TIMES, _LONG))
                tasks.create_task(self.limited(takes, world.one_of("deadline", _TIMES)))

    async def meet(self) -> None:
        """One request is answered, and lets the second in, in the moment that ends the third."""
        moment = self.world.one_of("moment", _TIMES)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.ask(self.body(_SLOW, moment)))
            tasks.create_task(self.limited(_LONG, 2 * moment))
            tasks.create_task(self.limited(_LONG, moment))

    async def limited(self, number: int, milliseconds: int) -> None:
        """Ask for what may take longer than its deadline."""
        world, seconds = self.world, milliseconds / 1000
        how: dict[str, Any] = {"timeout": seconds}
        body = self.body(_SLOW, number)
        if world.draw("into", 2):
            how["into"] = bytearray(len(body))
        began = world.now
        try:
            await world.within(seconds + world.patience, "request()", self.ask(body, **how))
        except aiordma.RequestDeadlineError:
            early = began + seconds - world.now
            assert early < 1e-6, f"a deadline came {early:.6f} s too early"
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling(), "a deadline has canceled the task of its call"

    async def gives_up(self) -> None:
        """Ask, and leave after a few turns of the loop."""
        kind = self.world.one_of("kind", (_PLAIN, _LARGE, _FAILS, _GIVES_UP, _SLOW))
        body = self.body(kind, self.world.draw("number", 40))
        await within_turns(self.world.draw("turns", 60), self.ask(body))


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    for each in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(each, Exception):
            raise each


async def calls(world: World) -> None:
    """Clients that ask in all ways, and after each way again, plainly."""
    service = _Service(world)

    async def client(port: int) -> None:
        with unless_broken(world):
            async with connected(world, port) as connection:
                client = _Client(world, connection, service)
                ways = (client.plainly, client.race, client.late, client.meet, client.gives_up)
                for _ in range(count_of(world, "rounds", 12)):
                    await world.one_of("way", ways)()
                    await client.plainly()

    async with (
        aiordma.serve_requests(
            service,
            ADDRESS,
            0,
            limit=world.one_of("limit", (256, 1, 1, 2, 3)),
            limit_bytes=world.one_of("limit_bytes", (64 << 20, 20_000, 1000)),
            max_concurrent=world.one_of("concurrent", (100, 1, 2)),
            config=settings(world),
        ) as server,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(count_of(world, "clients", 2)):
            tasks.create_task(client(server.port))
    most = max(service.served.values(), default=0)
    assert most <= 1, "a request was served twice"
