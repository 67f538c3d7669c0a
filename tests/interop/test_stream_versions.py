"""Private data of another version, or none: the server rejects, the client raises."""

from __future__ import annotations

import asyncio
import struct
from asyncio import StreamReader, StreamWriter

import pytest

import aiordma
from aiordma import ConnectionRejectedError, ProtocolError
from aiordma.cm import EventChannel, PortSpace
from tests.interop.native import PARAMETER, End, dial, serving
from tests.interop.program import running
from tests.interop.rstream_peer import Run, Talk
from tests.interop.streaming import serving_one
from tests.native_ends import close_all

#: As rsockets has it: version, flags, credits, slots, then three buffers of which none is there.
HELLO = struct.Struct("!BBH3xBQIIQII")
WRONG = {
    "version 2": HELLO.pack(2, 2, 384, 0, 4096, 1, 2, 8192, 2, 65_536),
    "version 0": HELLO.pack(0, 2, 384, 0, 4096, 1, 2, 8192, 2, 65_536),
    "nothing": b"",
    "no credits": HELLO.pack(1, 2, 0, 0, 4096, 1, 2, 8192, 2, 65_536),
    "no buffer": HELLO.pack(1, 2, 384, 0, 4096, 1, 2, 8192, 2, 0),
}
each_wrong = pytest.mark.parametrize("hello", WRONG.values(), ids=WRONG)


@each_wrong
async def test_server_rejects(address: str, hello: bytes) -> None:
    """And serves the next, which is rstream."""
    run = Run(64)

    async def talk(reader: StreamReader, writer: StreamWriter) -> None:
        await Talk(reader, writer, run, first=False).all()

    async with serving_one(address, talk) as served:
        events = EventChannel()
        with pytest.raises(ConnectionRejectedError):
            await dial(events, (address, served.port), lambda _: None, hello, PortSpace.TCP)
        events.close()
        await events.wait_closed()
        async with running(*run.client(address, served.port)) as rstream:
            await served.ended
            await rstream.finish()


@each_wrong
async def test_client_raises(address: str, hello: bytes) -> None:
    async with serving(address) as server:
        connecting = asyncio.create_task(aiordma.open_connection(address, server.port))
        request = await server.request()
        assert request.private_data[0] == 1
        assert request.connection_id is not None
        end = End(request.connection_id)
        try:
            await end.cm_id.accept(PARAMETER, private_data=hello)
            with pytest.raises(ProtocolError, match="rsockets"):
                await connecting
        finally:
            await close_all(end)
