"""rdma_client and rdma_server: 16 bytes there, 16 bytes back, and goodbye."""

from __future__ import annotations

import pytest

import aiordma
from aiordma import ConnectionConfig, ConnectionLostError
from aiordma.cm import EventType
from aiordma.verbs import SGE
from tests.interop.native import PARAMETER, POISON, End, dialed, serving
from tests.interop.program import assert_bytes, running, until_listening
from tests.native_ends import close_all

RAW = ConnectionConfig(raw=True, slot_size=64, recv_depth=2, send_depth=1)
THEIRS = bytes(16)  # both programs send an array that nothing was written to
OURS = bytes(range(16))


async def test_aiordma_serves_rdma_client(address: str) -> None:
    async with (
        aiordma.listen(address, 0, config=RAW) as listener,
        running("rdma_client", "-s", address, "-p", str(listener.port)) as client,
        await listener.accept() as connection,
    ):
        assert await connection.recv() == THEIRS
        await connection.send(OURS)
        with pytest.raises(ConnectionLostError, match="closed by the peer"):
            await connection.recv()
        await client.finish()
    assert client.lines == ["rdma_client: start", "rdma_client: end 0"]


async def test_rdma_server_serves_aiordma(address: str, port: int) -> None:
    async with running("rdma_server", "-s", address, "-p", str(port)) as server:
        connection = await until_listening(
            server, port, lambda: aiordma.connect(address, port, config=RAW)
        )
        async with connection:
            await connection.send(OURS)
            assert await connection.recv() == THEIRS
            with pytest.raises(ConnectionLostError, match="closed by the peer"):
                await connection.recv()
        await server.finish()
    assert server.lines == ["rdma_server: start", "rdma_server: end 0"]


# The same by hand, into memory that is not zero before: their zeros do arrive, and nothing else.


async def test_what_rdma_client_sends(address: str) -> None:
    async with (
        serving(address) as server,
        running("rdma_client", "-s", address, "-p", str(server.port)) as client,
    ):
        request = await server.request()
        assert request.connection_id is not None
        end = End(request.connection_id)
        try:
            region = end.region(64)
            end.post_recv(SGE(region))
            await end.cm_id.accept(PARAMETER)
            assert (await end.received()).byte_len == len(THEIRS)
            assert_bytes(region.view, THEIRS + POISON * 48)
            await end.send_last(SGE(region, 0, 16))
            await server.event(EventType.DISCONNECTED)
        finally:
            await close_all(end)
        await client.finish()


async def test_what_rdma_server_sends(address: str, port: int) -> None:
    regions = []

    def prepare(end: End) -> None:
        regions.append(end.region(64))
        end.post_recv(SGE(regions[-1]))

    async with (
        running("rdma_server", "-s", address, "-p", str(port)) as server,
        dialed(server, address, port, prepare) as connection,
    ):
        end, region = connection.end, regions[-1]
        await end.send_last(SGE(end.region(16)))
        assert (await end.received()).byte_len == len(THEIRS)
        assert_bytes(region.view, THEIRS + POISON * 48)
        await connection.disconnected()
        await server.finish()
