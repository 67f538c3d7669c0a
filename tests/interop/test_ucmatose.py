"""ucmatose: many connections at a time, a number of messages in each direction on each.

The server speaks first.  Each connection of ucmatose has one piece of memory, into which all
messages arrive and from which all are sent: what it sends before it has received anything is what
malloc gave it, and what it sends afterwards is the message that arrived last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, ConnectionFailedError, ListenerLimits
from tests.interop.program import (
    Program,
    assert_bytes,
    attempts,
    ended_by_peer,
    running,
    spoke_too_soon,
    until_listening,
)

MESSAGES = 10
FEW = 5  # connections, where they are not the point
SIZE = 2000
CONFIG = ConnectionConfig(raw=True, slot_size=SIZE, recv_depth=MESSAGES, send_depth=MESSAGES)
LIMITS = ListenerLimits(handshake_timeout_s=35)

# The GNU C library fills what malloc returns with the complement of this byte.  (Not what is below
# about a KiB: that comes from a cache which it does not fill.)
PERTURB = 0xA5
FRESH = bytes([PERTURB ^ 0xFF])

OPTIONS = pytest.mark.parametrize(
    "options",
    [(), ("-m",), ("-a", "14", "-t", "0x20")],
    ids=["plain", "other channel", "ACK timeout and type of service"],
)


def ucmatose(port: int, connections: int, *options: str) -> tuple[str, ...]:
    counts = ("-c", str(connections), "-C", str(MESSAGES), "-S", str(SIZE))
    return ("ucmatose", "-p", str(port), *counts, *options)


def message(connection: int, number: int) -> bytes:
    """Bytes that no other message has."""
    return f"{connection}.{number} ".encode().ljust(SIZE, bytes([number]))


def assert_well(program: Program) -> None:
    assert program.lines[-2:] == ["test complete", "return status 0"]
    assert not [line for line in program.lines if "error" in line or "fail" in line]


@OPTIONS
async def test_aiordma_serves_ucmatose(address: str, most: int, options: tuple[str, ...]) -> None:
    count = FEW if options else most

    async def talk(connection: Connection, number: int) -> None:
        async with connection:
            for n in range(MESSAGES):
                await connection.send(message(number, n))
            # The client answers when the messages of all connections are there.
            for _ in range(MESSAGES):
                with await connection.recv() as reply:
                    assert_bytes(memoryview(reply), message(number, MESSAGES - 1))

    async with aiordma.listen(address, 0, config=CONFIG, backlog=count, limits=LIMITS) as listener:
        command = ucmatose(listener.port, count, "-s", address, *options)
        async with running(*command) as client, asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(talk(await listener.accept(), number))
            await client.finish()
    assert_well(client)
    assert listener.refused == 0


@OPTIONS
async def test_ucmatose_serves_aiordma(
    address: str, port: int, most: int, options: tuple[str, ...]
) -> None:
    count = FEW if options else most

    async def talk(connection: Connection, number: int) -> None:
        async with connection:
            for _ in range(MESSAGES):
                with await connection.recv() as fresh:
                    assert_bytes(memoryview(fresh), FRESH * SIZE)
            for n in range(MESSAGES):
                await connection.send(message(number, n))
            await ended_by_peer(connection)

    async def dial(at: int) -> list[Connection | BaseException]:
        def open_one() -> Awaitable[Connection]:
            return aiordma.connect(address, at, config=CONFIG, timeout=35)

        first = await until_listening(server, at, open_one)
        others = (open_one() for _ in range(1, count))
        return [first, *await asyncio.gather(*others, return_exceptions=True)]

    tunables = f"glibc.malloc.perturb={PERTURB}"
    for at in attempts(port):
        command = ucmatose(at, count, "-b", address, *options)
        async with running(*command, GLIBC_TUNABLES=tunables) as server:
            opened = await dial(at)
            connections = [one for one in opened if isinstance(one, Connection)]
            if len(connections) == count:
                await asyncio.gather(*map(talk, connections, range(count)))
                await server.finish()
                break
            for connection in connections:
                connection.abort()
            for failure in opened:
                if isinstance(failure, ConnectionFailedError) and spoke_too_soon(failure):
                    continue
                if isinstance(failure, BaseException):
                    raise failure
    else:
        pytest.fail("ucmatose always spoke too soon")
    assert_well(server)
