"""Operations: a crowd of tasks that READ and WRITE, of which a few at a time have their turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import aiordma
from tests.simulation.common import (
    ADDRESS,
    BROKEN,
    OTHER,
    count_of,
    pattern,
    unheard,
    unless_broken,
)
from tests.simulation.world import World

__all__ = ["operations"]

#: Operations that a task may have had, at most, while another one waited for its turn.
_PATIENT = 40


class _Client:
    """The tasks of one client, on rows of memory of the server's."""

    def __init__(self, world: World, connection: aiordma.Connection, row: int) -> None:
        self.world = world
        self.connection = connection
        self.row = row
        self.rows: aiordma.RemoteRegion
        #: A copy of the rows, and its registration, if the run has one.
        self.memory = bytearray()
        self.region: aiordma.verbs.MemoryRegion | None = None
        self.reads = bool(world.draw("reads", 2))
        #: Operations of each task.
        self.had: Counter[int] = Counter()

    async def take(self, place: int, turns: int) -> None:
        """Write to a row, and read it, a few times, each time something else."""
        world, row = self.world, self.row
        part = self.rows[place * row : (place + 1) * row]
        for turn in range(turns):
            data = pattern(place << 32 | turn, row)
            at = place * row
            if self.region is None:
                writing = self.connection.write(part, data)
            else:  # out of memory that all tasks share
                self.memory[at : at + row] = data
                writing = self.connection.write(part, self.region[at : at + row])
            await self.timely(place, "write()", writing)
            if not self.reads:
                continue
            back = bytearray(row)
            reading = self.connection.read(self.rows, back, offset=at)
            if world.once_in("canceled", 8):
                task = asyncio.create_task(reading)
                unheard(task)
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                # What the adapter still reads goes elsewhere, or here, until it has ended.
                if task.cancelled() or task.exception():
                    continue
            else:
                await self.timely(place, "read()", reading)
            assert back == data, "a READ has not what was written before it"

    async def timely(self, place: int, what: str, call: Coroutine[Any, Any, int]) -> None:
        """Await an operation, for which no task may have many turns meanwhile."""
        world, had = self.world, self.had.copy()
        await world.within(world.patience, what, call)
        self.had[place] += 1
        if not world.may_delay:
            most = max(self.had[each] - had[each] for each in self.had)
            world.check(most <= _PATIENT, f"{what} has waited for {most} operations of one task")

    async def stand_still(self) -> None:
        """Block the loop, now and then, while all wait."""
        for _ in range(self.world.draw("blocks", 5)):
            for _ in range(self.world.draw("turns between", 20)):
                await asyncio.sleep(0)
            seconds = self.world.one_of("blocks for", (0.6, 0.1, 2.0))
            self.world.block(seconds)


async def operations(world: World) -> None:
    """Many tasks with few places, beside a greedy one, while leases end and the loop is blocked."""
    row = world.one_of("row", (8, 256, 20_000, 5_000, 60_000))
    rows = count_of(world, "rows", 80 if row < 1000 else 12)
    table = bytearray(rows * row)
    config = aiordma.ConnectionConfig(one_sided_depth=world.one_of("depth", (16, 1, 2, 5)))

    async def handler(connection: aiordma.Connection) -> None:
        with contextlib.suppress(*BROKEN):
            async with connection.expose(table, read=True, write=True) as region:
                await connection.send(region.to_bytes())
                lending = asyncio.create_task(lend(connection))
                unheard(lending)
                try:
                    (await connection.recv()).release()
                finally:
                    lending.cancel()
                    await asyncio.wait([lending])

    async def lend(connection: aiordma.Connection) -> None:
        """Open other memory for a moment, which is nothing to the accesses to the table."""
        for _ in range(world.draw("leases", 3)):
            async with connection.expose(bytearray(64), read=True, write=True):
                for _ in range(world.draw("lent for", 30)):
                    await asyncio.sleep(0)

    async def client(port: int) -> None:
        source = world.one_of("other adapter", (None, (OTHER, 0)))
        opening = aiordma.connect(ADDRESS, port, local_addr=source, config=config)
        async with await opening as connection:
            own = _Client(world, connection, row)
            with await connection.recv() as message:
                own.rows = aiordma.RemoteRegion.from_bytes(bytes(message))
            if world.draw("registered", 2):
                own.memory = bytearray(rows * row)
                own.region = await connection.register(own.memory)
            work = [own.stand_still()]
            for place in range(rows):
                greedy = not place and row < 1000
                turns = world.one_of("turns", (1, 30, 60)) if greedy else 1
                work.append(own.take(place, turns))
            # Each hears by itself that the connection is lost.
            ends = await asyncio.gather(*work, return_exceptions=True)
            if errors := [end for end in ends if isinstance(end, BaseException)]:
                raise BaseExceptionGroup("operations", errors)
            await connection.send(b"done")

    async with aiordma.serve(handler, ADDRESS, 0) as server:
        with unless_broken(world):
            await client(server.port)
