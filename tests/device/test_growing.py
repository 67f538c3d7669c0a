"""A connection with default settings begins with few slots, and gets more as it needs them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import aiordma
from aiordma.endpoint.config import DEFAULTS, MIN_WINDOW
from aiordma.errors import errno_error
from aiordma.memory import arena as arenas
from tests.device.meeting import paired
from tests.device.oracle import until
from tests.device.test_permissions import modes
from tests.inside.endpoint import budget_of, link_of, receiver_of, share_of, state_of

pytestmark = pytest.mark.device


LIMIT_S = 120
MESSAGES = 20 + 20 + 4 + 3 + 2 + 2  # of a connection, in fifty.py


def window_of(connection: aiordma.Connection) -> int:
    return receiver_of(connection).window.size


async def echo(
    connection: aiordma.Connection, count: int, size: int, imm: int | None = None
) -> None:
    for number in range(count):
        data = bytes([number % 256]) * size
        await connection.send(data, imm=imm)
        with await connection.recv() as answer:
            assert answer == data


async def answer(connection: aiordma.Connection) -> None:
    async for message in connection:
        await connection.send(message)


@pytest.mark.smoke
async def test_as_many_messages_go_ahead_as_the_settings_say(address: str) -> None:
    """The receiver's program takes none of them."""
    async with paired(address) as (client, server):
        for number in range(DEFAULTS.recv_depth):
            async with asyncio.timeout(20):
                await client.send(b"%d" % number)
        await client.flush()
        further = asyncio.create_task(client.send(b"one more"))
        await until(lambda: not state_of(client).credits and state_of(server).arrived == 64)
        assert not further.done()
        assert window_of(server) == DEFAULTS.recv_depth
        for number in range(DEFAULTS.recv_depth):
            with await server.recv() as message:
                assert message == b"%d" % number
        await further
        assert await server.recv() == b"one more"


@pytest.mark.parametrize("size", [10_000, 65_536, 32 * 5000])
async def test_a_longer_message_gets_the_slots_that_it_takes(address: str, size: int) -> None:
    """The first may be fetched; those that follow go through slots, as they have an immediate."""
    async with paired(address) as (client, server), asyncio.TaskGroup() as group:
        group.create_task(answer(server))
        await echo(client, 4, size, 7)
        # The slots of a send are free when it has completed, perhaps later than its answer comes.
        await client.flush()
        before = state_of(client).sent
        await echo(client, 1, size, 7)
        assert state_of(client).sent - before >= size // DEFAULTS.slot_size
        await client.close()


async def test_a_connection_goes_on_with_what_it_has(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Further memory cannot be registered."""

    def refuse(*_: object) -> None:
        raise errno_error(errno.ENOMEM, "ibv_reg_mr")

    monkeypatch.setattr(arenas, "MemoryRegion", refuse)
    async with paired(address) as (client, server):
        for size in (64, 10_000, 300_000):
            sends = [asyncio.create_task(client.send(bytes([n]) * size)) for n in range(20)]
            for number in range(20):
                with await server.recv() as message:
                    assert message == bytes([number]) * size
            await asyncio.gather(*sends)
        assert window_of(server) == MIN_WINDOW
        assert "no more slots" in caplog.text
        monkeypatch.undo()
        sends = [asyncio.create_task(client.send(bytes([n]))) for n in range(64)]
        for number in range(64):
            with await server.recv() as message:
                assert message == bytes([number])
        await asyncio.gather(*sends)


async def test_the_memory_of_a_connection_counts_until_it_is_gone(address: str) -> None:
    async with paired(address) as (client, server):
        sends = [asyncio.create_task(client.send(bytes([n]))) for n in range(64)]
        for _ in range(64):
            (await server.recv()).release()
        await asyncio.gather(*sends)
        share = share_of(server)
        assert share is not None
        assert share.size == sum(region.length for region in link_of(server).slots.recv.steps)
        budget = budget_of(server)
        assert budget.used >= share.size
    await until(lambda: budget.used == 0, 60)


@pytest.mark.one_loop
def test_fifty_connections_within_eight_mebibytes(address: str) -> None:
    """Of a server and a client without privileges: as much as a system gives by default."""
    program = [sys.executable, "-W", "error", str(Path(__file__).with_name("fifty.py"))]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with (
        modes(),
        subprocess.Popen(
            [*program, address], stdout=subprocess.PIPE, text=True, env=environ
        ) as server,
    ):
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            done = subprocess.run(
                [*program, address, port],
                capture_output=True, check=False, text=True, timeout=LIMIT_S, env=environ,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            told = [json.loads(done.stdout), json.loads(server.communicate(timeout=LIMIT_S)[0])]
        finally:
            server.kill()
    print(told)
    assert [end["connections"] for end in told] == [50, 50]
    assert [end["messages"] for end in told] == [50 * MESSAGES] * 2
    assert all(50 * 60_000 < end["pinned"] <= 8 << 20 for end in told)


def alone(address: str, what: str) -> dict[str, int]:
    """Run fifty.py as both ends, and return what it tells."""
    program = [sys.executable, "-W", "error", str(Path(__file__).with_name("fifty.py"))]
    with modes():
        done = subprocess.run(
            [*program, address, what],
            capture_output=True, check=False, text=True, timeout=LIMIT_S,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    print(told)
    return told


@pytest.mark.kernel
def test_transfers_within_eight_mebibytes(address: str) -> None:
    """READs and WRITEs of buffers that have to be registered, more at a time than can be."""
    told = alone(address, "transfers")
    assert told["messages"] == 2 * 40
    assert told["pinned"] <= 8 << 20


@pytest.mark.one_loop
def test_both_ends_of_twenty_five_connections_within_eight_mebibytes(address: str) -> None:
    """Of one process: the sends of one end leave memory to the fetches of the other."""
    told = alone(address, "pairs")
    assert told["connections"] == 25
    assert told["messages"] == 2 * 25 * MESSAGES, "of both ends"
    assert told["pinned"] <= 8 << 20
