"""cmtime: nothing but connections, many at a time, and how long each step takes."""

from __future__ import annotations

import asyncio

import aiordma
from aiordma import Connection, ConnectionConfig, ListenerLimits
from tests.interop import cmtime
from tests.interop.cmtime import CONNECT, DISCONNECT, INIT_QP, RESET, Kind
from tests.interop.program import ended_by_peer, running, until_listening

CONFIG = ConnectionConfig(raw=True, slot_size=64, recv_depth=2, send_depth=1)
LIMITS = ListenerLimits(handshake_timeout_s=35)


async def test_aiordma_serves_cmtime(address: str, most: int) -> None:
    async def talk(connection: Connection) -> None:
        async with connection:
            await ended_by_peer(connection)

    program = await cmtime.installed(most)
    async with (
        aiordma.listen(address, 0, config=CONFIG, backlog=most, limits=LIMITS) as listener,
        program.client(address, listener.port) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(sum(program.rounds)):
            group.create_task(talk(await listener.accept()))
        await client.finish()
    assert cmtime.steps_of(client.lines) == program.table
    # Between them are the names of the steps alone: no event that reports an error.
    assert not [line for line in client.lines if "error" in line or "fail" in line]
    assert listener.refused == 0


async def test_cmtime_serves_aiordma(address: str, port: int, most: int) -> None:
    program = await cmtime.installed(most)
    if program.kind is Kind.ALONE:
        await _is_served(address, port, most)
    else:
        await _is_served_in_step(program, address, port)


async def _connect(address: str, port: int) -> Connection:
    return await aiordma.connect(address, port, config=CONFIG, timeout=35)


async def _connect_all(count: int, address: str, port: int) -> list[Connection]:
    return await asyncio.gather(*(_connect(address, port) for _ in range(count)))


async def _close_all(connections: list[Connection]) -> None:
    numbers = {connection.get_extra_info("qpn") for connection in connections}
    assert len(numbers) == len(connections)
    await asyncio.gather(*(connection.close() for connection in connections))


async def _is_served(address: str, port: int, most: int) -> None:
    """The program has no end of its own; every connection to it has one in good order."""
    async with running("cmtime", "-b", address, "-p", str(port)) as server:
        first = await until_listening(server, port, lambda: _connect(address, port))
        await _close_all([first, *await _connect_all(most - 1, address, port)])
        # It still serves.
        await _close_all(await _connect_all(1, address, port))
        assert not server.ended
    assert server.lines == []


async def _is_served_in_step(program: cmtime.Cmtime, address: str, port: int) -> None:
    """It prints its tables and ends when the last connection of the last round has ended."""
    command = ["cmtime", "-b", address, "-p", str(port), "-c", str(program.most)]
    in_mesh = program.kind is Kind.MESH
    if in_mesh:
        command += ["-L", "-C", address]
    async with running(*command) as server:
        async with cmtime.dialed(server, address, port) as steps:
            listens = await steps.where(address) if in_mesh else port
            for count in program.rounds:
                await steps.done(RESET)
                if in_mesh:
                    await steps.done(INIT_QP)
                connections = await _connect_all(count, address, listens)
                await steps.done(CONNECT)
                await _close_all(connections)
                await steps.done(DISCONNECT)
        await server.finish()
    assert cmtime.steps_of(server.lines) == program.table
    assert not [line for line in server.lines if "error" in line or "fail" in line]
