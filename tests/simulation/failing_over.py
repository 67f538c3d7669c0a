"""Failing over: a pool with several servers, of which one after the other dies and comes again."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import aiordma
from tests.simulation.common import (
    ADDRESS,
    BROKEN,
    OTHER,
    PORT,
    count_of,
    is_broken,
    pattern,
    settings,
    size_of,
    unless_broken,
)
from tests.simulation.world import World

__all__ = ["failover"]

#: Seconds of the longest pause between two attempts to connect.
_PAUSE_S = 0.5


class _Servers:
    """Servers with addresses of their own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.running: dict[int, aiordma.Server] = {}
        self.config = settings(world)

    async def start(self, port: int) -> None:
        """Have one serve."""
        self.running[port] = await aiordma.serve_requests(
            self.handle, ADDRESS, port, config=self.config, grace_s=1.0
        )

    async def die(self, port: int) -> None:
        """All connections of one are aborted, and it is gone."""
        server = self.running.pop(port)
        # In an order of their own: that of a set is another in each run.
        for connection in sorted(server.connections, key=_peer):
            connection.abort()
        await self.world.within(self.world.patience + 40, "stop()", server.stop())

    async def handle(self, request: aiordma.Request) -> bytes:
        """Answer after a while."""
        body = bytes(request.body)
        if self.world.once_in("slow", 4):
            await asyncio.sleep(self.world.draw("sleep", 100) / 1000)
        return body[::-1]


def _peer(connection: aiordma.Connection) -> tuple[Any, ...]:
    return tuple(connection.get_extra_info("peername"))


async def failover(world: World) -> None:
    """Idempotent requests all have their answers, and connections return to who has returned."""
    servers = _Servers(world)
    over = asyncio.Event()

    async def ask(pool: aiordma.Pool, name: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            body = pattern(name << 32 | number, 16 + size_of(world) // 8)
            limit = None
            if world.once_in("canceled", 8):
                limit = world.draw("until", 100) / 20_000
            try:
                async with asyncio.timeout(limit):
                    call = pool.request(body, timeout=60.0, idempotent=True)
                    with await world.within(world.patience + 100, "request()", call) as answer:
                        world.check(bytes(answer) == body[::-1], "an answer is another request's")
            except TimeoutError as error:
                if limit is None or isinstance(error, aiordma.RdmaError):
                    raise
            except aiordma.RequestRefusedError:
                pass  # the server has stopped behind the connect
            except BROKEN as error:
                if not world.may_break or not is_broken(world, error):
                    raise
            await asyncio.sleep(world.draw("rests", 400) / 1000)

    async def fall(ports: list[int]) -> None:
        for _ in range(count_of(world, "deaths", 2)):
            await asyncio.sleep(world.draw("stays", 3000) / 1000)
            port = world.one_of("dies", tuple(ports))
            await servers.die(port)
            await asyncio.sleep(world.draw("away", 3000) / 1000)
            await servers.start(port)
        await asyncio.sleep(4 * _PAUSE_S + 1.0)

    async def clients(ports: list[int], policy: Literal["failover", "spread"]) -> None:
        most = 1 + count_of(world, "most", 3)
        rails = world.one_of("rails", (None, None, [ADDRESS, OTHER]))
        async with aiordma.Pool(
            [(ADDRESS, port) for port in ports], policy=policy, local_addrs=rails, min_size=most,
            max_size=most, max_pause=_PAUSE_S, config=settings(world),
        ) as pool:  # fmt: skip
            await world.within(world.patience + 40, "wait()", pool.wait(None))
            async with asyncio.TaskGroup() as tasks:
                for name in range(count_of(world, "workers", 3)):
                    tasks.create_task(ask(pool, name))
                await fall(ports)
                stats = pool.stats
                world.check(stats.size <= most, f"{stats.size} connections, of at most {most}")
                if not world.may_break and not world.may_delay:
                    placed(stats, policy)
                over.set()
            world.check(pool.stats.waiting == 0, "a task waits for a connection")

    def placed(stats: Any, policy: str) -> None:
        ways = stats.addresses
        if policy == "failover":
            ways = tuple(way for way in ways if way.port == ways[0].port)
            world.check(
                sum(way.size for way in ways) == stats.size, f"they have not returned: {stats}"
            )
        sizes = [way.size for way in ways]
        world.check(max(sizes) - min(sizes) <= 1, f"they are not shared out: {stats}")

    with unless_broken(world):
        try:
            ports = [PORT + number for number in range(1 + count_of(world, "servers", 2))]
            for port in ports:
                await servers.start(port)
            await clients(ports, world.one_of("policy", ("failover", "spread")))
        finally:
            for port in tuple(servers.running):
                await servers.die(port)
