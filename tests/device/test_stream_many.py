"""Two hundred streams at once, again and again: nothing stays."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from typing import Any

import pytest

import aiordma
from aiordma import StreamConfig
from tests.device.oracle import adapter_objects, rdma_descriptors, settle
from tests.inside.streams import active_of

pytestmark = [pytest.mark.device, pytest.mark.slow]

IS_SIW = os.environ.get("AIORDMA_SOFTROCE_DEVICE") == "siw"
COUNT = 200
# AIORDMA_STREAM_ROUNDS=20 is the whole of it, which takes some minutes on Soft-RoCE.
ROUNDS = int(os.environ.get("AIORDMA_STREAM_ROUNDS", "1" if IS_SIW else "2"))
SIZE = 1 << 20
CHUNK = 64 * 1024
CONFIG = StreamConfig(receive_buffer_size=32 * 1024, send_buffer_size=32 * 1024)


class Answer(asyncio.Protocol):
    """Answers all that a client says with its hash, and goes."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.got = hashlib.sha256()

    def data_received(self, data: bytes) -> None:
        self.got.update(data)

    def eof_received(self) -> None:
        self.transport.write(self.got.digest())


@pytest.mark.one_device
@pytest.mark.timeout(1800)
async def test_two_hundred_at_once_and_again(address: str) -> None:
    data = os.urandom(CHUNK)
    digest = hashlib.sha256(data * (SIZE // CHUNK)).digest()

    def resident() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

    server = await aiordma.create_server(Answer, address, 0, backlog=COUNT, config=CONFIG)
    before = adapter_objects(), rdma_descriptors()
    sizes = []
    for number in range(ROUNDS):
        begun = time.monotonic()
        all_open = asyncio.Barrier(COUNT)

        async def client(all_open: asyncio.Barrier = all_open) -> bytes:
            reader, writer = await aiordma.open_connection(
                address, server.port, config=CONFIG, timeout=60
            )
            try:
                await all_open.wait()
                for _ in range(SIZE // CHUNK):
                    writer.write(data)
                    await writer.drain()
                writer.write_eof()
                return await reader.read()
            finally:
                writer.close()
                await writer.wait_closed()

        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            clients = [group.create_task(client()) for _ in range(COUNT)]
        print(f"round {number}: {time.monotonic() - begun:.1f} s to the last answer")
        assert [task.result() for task in clients] == [digest] * COUNT
        await settle(120)  # 400 queue pairs take their time
        assert active_of(server) == 0
        left = adapter_objects() - before[0]
        assert not left, f"left after round {number}: {left}"
        assert rdma_descriptors() == before[1]
        sizes.append(resident())
        print(f"round {number}: {time.monotonic() - begun:.1f} s, resident {sizes[-1]} KiB")
    server.close()
    await server.wait_closed()
    if ROUNDS > 3:
        assert sizes[-1] < sizes[1] * 1.2, f"it grows: {sizes}"
