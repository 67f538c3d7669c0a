"""Two processes: many random messages, and a peer that is killed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import aiordma
from aiordma import Connection
from tests.device.meeting import still_accepts

pytestmark = pytest.mark.device

SEED = 10_000
IS_SIW = os.environ.get("AIORDMA_SOFTROCE_DEVICE") == "siw"
COUNT = int(os.environ.get("AIORDMA_TEST_MESSAGES", "3000" if IS_SIW else "10000"))


@asynccontextmanager
async def peer(role: str, address: str, loop: str) -> AsyncIterator[tuple[int, int]]:
    """A peer process; (port, pid)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-X", "dev", str(Path(__file__).with_name("peer.py")),
        role, address, "0", loop,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):  # it starts in an emulated guest, too
            line = await process.stdout.readline()
        assert line.startswith(b"ready"), line
        yield int(line.split()[1]), process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # reads to the end: the pipes are closed, too


@pytest.mark.one_device
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_thousands_of_messages_come_back(address: str, loop_name: str) -> None:
    """Random sizes from 0 to 1 MiB, every byte compared by digest, and no CPU when idle."""
    rng = random.Random(SEED)
    # Most messages are small, as in life; every size up to 1 MiB is possible.
    sizes = [int(2 ** (20 * rng.random() ** 2)) - 1 for _ in range(COUNT - 2)] + [0, 1 << 20]
    pool = rng.randbytes(2 << 20)
    print(f"seed {SEED}, {COUNT} messages, {sum(sizes)} bytes")

    async with (
        peer("echo", address, loop_name) as (port, _),
        aiordma.connect(address, port) as client,
    ):

        def content(number: int) -> memoryview:
            start = number * 7919 % (1 << 20)
            return memoryview(pool)[start : start + sizes[number]]

        async def send_all() -> None:
            for number in range(COUNT):
                await client.send(content(number), imm=number)

        async with asyncio.TaskGroup() as group:
            group.create_task(send_all())
            for number in range(COUNT):
                with await client.recv() as message:
                    assert message.imm == number
                    assert len(message) == sizes[number]
                    assert hashlib.sha1(message).digest() == hashlib.sha1(content(number)).digest()
        assert client.stats.messages_received == COUNT
        await assert_idle(2.0)


async def assert_idle(seconds: float) -> None:
    """Nothing is polled while nothing happens."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 0.05 * seconds, f"{used:.3f} s of CPU in {seconds} s of doing nothing"


@pytest.mark.smoke
async def test_a_few_messages_come_back(address: str, loop_name: str) -> None:
    async with (
        peer("echo", address, loop_name) as (port, _),
        aiordma.connect(address, port) as client,
    ):
        for size in (0, 64, 100_000):
            data = os.urandom(size)
            await client.send(data)
            assert await client.recv() == data


async def _fill(connection: Connection, under_way: asyncio.Event) -> None:
    while True:
        await connection.send(bytes(3000))
        await connection.send(bytes(300_000))
        if connection.stats.bytes_sent > 2_000_000:
            under_way.set()


async def _drop_all(connection: Connection) -> None:
    while True:
        (await connection.recv()).release()


async def _read_all(connection: Connection, remote: aiordma.RemoteRegion) -> None:
    while True:
        await connection.read(remote, bytearray(len(remote)))


@pytest.mark.parametrize("busy", [True, False], ids=["during transfer", "idle"])
async def test_a_killed_peer_is_noticed(address: str, loop_name: str, *, busy: bool) -> None:
    """The survivor's awaits end with a reset that names the cause; its listener still serves."""
    async with aiordma.listen(address, 0) as listener:
        async with peer("sink", address, loop_name) as (port, pid):
            client = await aiordma.connect(address, port)
            waiting = [asyncio.create_task(_drop_all(client))]
            if busy:
                under_way = asyncio.Event()
                waiting.append(asyncio.create_task(_fill(client, under_way)))
                async with asyncio.timeout(30):
                    await under_way.wait()
            os.kill(pid, 9)
            async with asyncio.timeout(20):
                await asyncio.wait(waiting)
            for task in waiting:
                error = task.exception()
                assert isinstance(error, ConnectionResetError), error
                assert "without a word" in str(error) or error.__cause__ is not None
            await client.close()
        await still_accepts(listener, address)


@pytest.mark.slow
async def test_a_peer_that_is_killed_while_its_memory_is_read(address: str, loop_name: str) -> None:
    """The kernel may take the memory before the connection: the read is refused, or it is lost."""
    for _ in range(5):
        async with peer("memory", address, loop_name) as (port, pid):
            client = await aiordma.connect(address, port)
            remote = aiordma.RemoteRegion.from_bytes(bytes(await client.recv()))
            await client.read(remote, bytearray(len(remote)))
            os.kill(pid, signal.SIGKILL)
            with pytest.raises((aiordma.ConnectionLostError, aiordma.RemoteAccessError)):
                await asyncio.wait_for(_read_all(client, remote), 20)
            client.abort()


async def test_a_listener_survives_a_killed_client(address: str, loop_name: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        code = (
            "import asyncio, aiordma\n"
            "async def main():\n"
            f"    c = await aiordma.connect({address!r}, {listener.port})\n"
            "    while True:\n"
            "        await c.send(bytes(1000))\n"
            "asyncio.run(main())\n"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        try:
            async with asyncio.timeout(30):
                server = await listener.accept()
                await server.recv()
            process.kill()
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(_drop_all(server), 20)
            await server.close()
        finally:
            await process.wait()
        await still_accepts(listener, address)
