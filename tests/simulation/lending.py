"""Lending: a pool whose connections are rare, and a server that does not stay well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import aiordma
from tests.simulation.common import (
    ADDRESS,
    BROKEN,
    count_of,
    is_broken,
    settings,
    unless_broken,
    within_turns,
)
from tests.simulation.world import World

__all__ = ["lending"]

#: Seconds of the longest pause between two attempts to connect.
_PAUSE_S = 0.4
#: Requests of a task, while another one wants a connection of its own.
_FLOW = 150
#: Seconds for which a server accepts clients and sends them away.
_ILL_S = 1.0


class _Server:
    """Answers; or for a while aborts each connection, at once or at its first request."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ill = False
        self.came = 0
        self.most = 0

    async def __call__(self, connection: aiordma.Connection) -> None:
        """Serve a connection."""
        self.came += 1
        if self.ill and self.came > self.most:
            self.world.check(False, f"{self.came} attempts to connect, with pauses: {self.most}")
            self.ill = False
        if self.ill and self.world.draw("at once", 2):
            connection.abort()
        await aiordma.handle_requests(connection, self.handle)

    async def handle(self, request: aiordma.Request) -> bytes:
        """Answer a request after a few milliseconds."""
        if self.ill:
            request.connection.abort()
        await asyncio.sleep((1 + self.world.draw("work", 3)) / 1000)
        return bytes(request.body)

    async def be_ill(self, most: int) -> None:
        """Send away who comes; pauses of at least 0.05, 0.1 s and so on are to be between them."""
        pauses = 2 + _ILL_S / (_PAUSE_S / 2)
        self.came, self.most = 0, most * (2 + round(pauses))
        self.ill = True
        await asyncio.sleep(_ILL_S)
        self.ill = False


class _Users:
    """Tasks that share the pool, and want connections of their own."""

    def __init__(self, world: World, pool: aiordma.Pool, server: _Server) -> None:
        self.world = world
        self.pool = pool
        self.server = server
        self.flows = False

    async def lent(self) -> None:
        """Borrow a connection, and ask by it."""
        async with self.pool.connection() as connection:
            with await connection.request(b"one") as answer:
                assert bytes(answer) == b"one", "an answer is another request's"

    async def asks(self) -> None:
        """Ask one request after the other, for longer than anybody may wait."""
        for _ in range(_FLOW):
            if not self.flows:
                break
            with await self.pool.request(b"another", timeout=None) as answer:
                assert bytes(answer) == b"another", "an answer is another request's"

    async def beside_a_flow(self) -> None:
        """Borrow while others do not cease to ask."""
        self.flows = True
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2 + self.world.draw("asking", 4)):
                tasks.create_task(self.asks())
                await asyncio.sleep(0.0004)
            try:
                await self.soon(self.lent())
            finally:
                self.flows = False

    async def handed_over(self) -> None:
        """Cancel the next in line in the moment of the lender's return; it is the third's turn."""
        async with asyncio.TaskGroup() as tasks:
            async with self.pool.connection():
                line = [tasks.create_task(self.lent()) for _ in range(3)]
                await asyncio.sleep(self.world.draw("keeps", 3) / 1000)
            line[self.world.draw("leaves", 2)].cancel()
            await self.soon(_any(line))

    async def impatient(self) -> None:
        """Leave the line, or the conversation, after a few turns of the loop."""
        call = self.world.one_of("call", (self.lent, self.once))
        await within_turns(self.world.draw("turns", 40), call())

    async def once(self) -> None:
        """Ask one request."""
        (await self.pool.request(b"once", idempotent=True)).release()

    async def while_ill(self) -> None:
        """Ask on while the server sends everybody away."""
        illness = asyncio.create_task(self.server.be_ill(3))
        while not illness.done():
            try:
                await self.once()
            except BROKEN as error:
                self.world.check(is_broken(self.world, error), f"request() has raised {error!r}")
            await asyncio.sleep(0.005)
        await illness
        await asyncio.sleep(_PAUSE_S)  # it may be in the last pause

    async def soon(self, call: Coroutine[None, None, None]) -> None:
        """Await what takes no longer than some requests."""
        await self.world.within(self.world.patience, "a connection of the pool", call)


async def _any(line: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(line)


async def lending(world: World) -> None:
    """Tasks that wait for the connections of a pool, and leave, one way after the other."""
    server = _Server(world)

    async def users(port: int) -> None:
        async with aiordma.Pool(
            ADDRESS, port, max_size=count_of(world, "most", 2), max_pause=_PAUSE_S,
            config=settings(world),
        ) as pool:  # fmt: skip
            each = _Users(world, pool, server)
            ways: tuple[Callable[[], Coroutine[None, None, None]], ...] = (
                each.handed_over, each.beside_a_flow, each.impatient, each.while_ill,
            )  # fmt: skip
            for _ in range(count_of(world, "rounds", 4)):
                await world.one_of("way", ways)()
                await each.soon(each.lent())

    with unless_broken(world):
        async with aiordma.serve(
            server, ADDRESS, 0, config=settings(world), grace_s=1.0
        ) as serving:
            await users(serving.port)
