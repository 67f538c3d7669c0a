"""cmtime: nothing but connections, many at a time, and how long each step takes."""

from __future__ import annotations

import asyncio

import aiordma
from aiordma import Connection, ConnectionConfig
from tests.interop.program import ended_by_peer, running, until_listening

CONFIG = ConnectionConfig(
    raw=True, slot_size=64, recv_depth=2, send_depth=1, connect_timeout_s=35, handshake_timeout_s=35
)
STEPS = [
    "create id", "resolve addr", "resolve route", "create qp", "connect", "disconnect", "destroy",
]  # fmt: skip


async def test_aiordma_serves_cmtime(address: str, most: int) -> None:
    async def talk(connection: Connection) -> None:
        async with connection:
            await ended_by_peer(connection)

    async with aiordma.listen(address, 0, config=CONFIG, backlog=most) as listener:
        command = ("cmtime", "-s", address, "-p", str(listener.port), "-c", str(most))
        async with running(*command) as client, asyncio.TaskGroup() as group:
            for _ in range(most):
                group.create_task(talk(await listener.accept()))
            await client.finish()
    table = client.lines[-len(STEPS) :]
    assert [line.partition(":")[0].strip() for line in table] == STEPS
    # Between them are the names of the steps alone: no event that reports an error.
    assert not [line for line in client.lines if "error" in line or "fail" in line]
    assert listener.refused == 0


async def test_cmtime_serves_aiordma(address: str, port: int, most: int) -> None:
    """The program has no end of its own; every connection to it has one in good order."""

    async def connect() -> Connection:
        return await aiordma.connect(address, port, config=CONFIG)

    async with running("cmtime", "-b", address, "-p", str(port)) as server:
        connections = [await until_listening(server, port, connect)]
        connections += await asyncio.gather(*(connect() for _ in range(1, most)))
        assert len({connection.get_extra_info("qpn") for connection in connections}) == most
        await asyncio.gather(*(connection.close() for connection in connections))
        # It still serves.
        await (await connect()).close()
        assert not server.ended
    assert server.lines == []
