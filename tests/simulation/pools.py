"""Pools: clients that share and lend connections, while the server comes and goes."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiordma
from tests.simulation.common import (
    ADDRESS,
    BROKEN,
    PORT,
    count_of,
    is_broken,
    pattern,
    settings,
    size_of,
    unless_broken,
)
from tests.simulation.world import World

__all__ = ["pool"]


async def pool(world: World) -> None:
    """Tasks with requests and lent connections; some are canceled, some connections are broken."""
    served: Counter[bytes] = Counter()
    breaks = world.once_in("server breaks", 3)
    again = world.once_in("server again", 4)
    fragile = breaks or again or world.may_break

    async def handle(request: aiordma.Request) -> bytes:
        body = bytes(request.body)
        served[body[:16]] += 1
        if world.once_in("slow", 4):
            await asyncio.sleep(world.draw("sleep", 200) / 1000)
        if breaks and world.once_in("breaks", 10):
            request.connection.abort()
        return body[::-1]

    async def worker(pool: aiordma.Pool, name: int, count: int) -> None:
        for index in range(count):
            body = pattern(name << 32 | index, 16) + pattern(index, size_of(world) // 8)
            lent = world.once_in("lent", 4)
            limit = None
            if world.once_in("canceled", 6):
                limit = world.draw("until", 100) / 20_000
            try:
                async with asyncio.timeout(limit):
                    # In line for a connection, with its pauses, and then for the answer.
                    bound = world.patience + (100 if fragile else 10)
                    call = by_lent(pool, body) if lent else by_request(pool, body)
                    await world.within(bound, "a call of the pool", call)
            except TimeoutError as error:
                canceled = limit is not None and not isinstance(error, aiordma.RdmaError)
                if not canceled and (not fragile or not is_broken(world, error)):
                    raise
            except aiordma.RequestRefusedError as error:
                # Of a lent connection whose server gives up; a pool sends its own elsewhere.
                if not (fragile and lent and error.try_again):
                    raise
                assert served[body[:16]] == 0, "a request is refused that was served"
            except BROKEN as error:
                if not fragile or not is_broken(world, error):
                    raise

    async def by_request(pool: aiordma.Pool, body: bytes) -> None:
        with await pool.request(body, idempotent=False) as answer:
            assert bytes(answer) == body[::-1], "an answer is another request's"
        assert served[body[:16]] == 1, "an answer has come, and nobody was asked"

    async def by_lent(pool: aiordma.Pool, body: bytes) -> None:
        async with pool.connection() as connection:
            assert connection not in lent_now, "a connection is lent twice"
            lent_now.append(connection)
            try:
                with await connection.request(body) as answer:
                    assert bytes(answer) == body[::-1], "an answer is another request's"
                if world.once_in("keeps", 3):
                    await asyncio.sleep(world.draw("keeps for", 100) / 1000)
            finally:
                lent_now.remove(connection)

    lent_now: list[aiordma.Connection] = []

    async def clients(port: int) -> None:
        most = count_of(world, "most", 3)
        async with aiordma.Pool(
            ADDRESS, port, min_size=world.draw("least", most + 1), max_size=most,
            config=settings(world), max_idle=world.one_of("idle", (600.0, 0.05)),
            max_lifetime=world.one_of("lifetime", (3600.0, 0.1)), max_pause=2.0,
        ) as pool:  # fmt: skip
            async with asyncio.TaskGroup() as tasks:
                for name in range(count_of(world, "workers", 6)):
                    count = count_of(world, "calls", 5)
                    tasks.create_task(worker(pool, name, count))
            stats = pool.stats
            world.check(stats.size <= most, f"{stats.size} connections, of at most {most}")
            world.check(stats.waiting == 0, "a task waits for a connection, and none is there")
            lent = stats.size - stats.available
            world.check(lent == 0, f"{lent} connections are in use, and by nobody")
            began = world.now
        took = world.now - began
        world.check(took < 25 + world.patience, f"the end of a pool took {took:.3f} s")

    config = settings(world)

    async def serve() -> aiordma.Server:
        return await aiordma.serve_requests(handle, ADDRESS, PORT, config=config, grace_s=1.0)

    with unless_broken(world):
        server = await serve()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(clients(PORT))
            try:
                if again:
                    await asyncio.sleep(world.draw("stops", 100) / 5000)
                    await server.stop()
                    await asyncio.sleep(world.draw("away", 3000) / 1000)
                    server = await serve()
                await asyncio.wait([running])
            finally:
                await world.within(world.patience + 40, "stop()", server.stop())
    world.check(set(served.values()) <= {1}, "a request was served twice that is not idempotent")
