"""grpclib under the switch: calls of each kind, TLS, deadlines, and connections that break."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trustme
from google.protobuf.wrappers_pb2 import BytesValue
from grpclib import GRPCError, Status
from grpclib.client import Channel, StreamStreamMethod, UnaryUnaryMethod
from grpclib.const import Cardinality, Handler
from grpclib.exceptions import StreamTerminatedError
from grpclib.server import Server

from tests.device.switching import Switched

pytestmark = pytest.mark.device

KIB = 1 << 10


class Echo:
    """Sends back what it gets; a message of no bytes is waited with for ever."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.canceled = asyncio.Event()

    async def each(self, stream: Any) -> None:
        async for message in stream:
            if message.value == b"bad":
                raise GRPCError(Status.INVALID_ARGUMENT, "it is bad")
            if not message.value:
                self.waits.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.canceled.set()
            await stream.send_message(message)

    def __mapping__(self) -> dict[str, Handler]:
        return {
            "/Echo/One": Handler(self.each, Cardinality.UNARY_UNARY, BytesValue, BytesValue),
            "/Echo/Many": Handler(self.each, Cardinality.STREAM_STREAM, BytesValue, BytesValue),
        }


class Stub:
    """As protoc's plugin makes it."""

    def __init__(self, channel: Channel) -> None:
        self.one = UnaryUnaryMethod(channel, "/Echo/One", BytesValue, BytesValue)
        self.many = StreamStreamMethod(channel, "/Echo/Many", BytesValue, BytesValue)


Scene = tuple[Server, Echo, Channel, Stub]


@asynccontextmanager
async def talking(
    address: str,
    server_tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Scene]:
    with socket.create_server((address, 0)) as free:  # the server does not tell its port
        port = free.getsockname()[1]
    echo = Echo()
    server = Server([echo])
    await server.start(address, port, ssl=server_tls)
    try:
        async with Channel(address, port, ssl=client_tls) as channel:
            yield server, echo, channel, Stub(channel)
    finally:
        server.close()
        await server.wait_closed()


def value(data: bytes) -> BytesValue:
    return BytesValue(value=data)


async def in_each_way(stub: Stub) -> None:
    for size in (1, 5 * KIB, 300 * KIB, 3000 * KIB):
        assert len((await stub.one(value(bytes(size)))).value) == size
    many = [value(b"%d" % number * 1000) for number in range(50)]
    assert await stub.many(many) == many
    answers = await asyncio.gather(*(stub.one(value(b"%d" % number)) for number in range(1, 100)))
    assert [answer.value for answer in answers] == [b"%d" % number for number in range(1, 100)]
    with pytest.raises(GRPCError, match="it is bad") as caught:
        await stub.one(value(b"bad"))
    assert caught.value.status is Status.INVALID_ARGUMENT


async def over_rdma(channel: Channel) -> None:
    protocol: Any = await channel.__connect__()
    transport: Any = protocol.connection._transport
    assert transport.get_extra_info("backend") == "rdma"


@pytest.mark.parametrize("tls", [False, True])
async def test_calls(address: str, switched: Switched, tls: bool) -> None:
    server_tls = client_tls = None
    if tls:
        authority = trustme.CA()
        server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(address).configure_cert(server_tls)
        client_tls = ssl.create_default_context()
        authority.configure_trust(client_tls)
        for context in (server_tls, client_tls):
            context.set_alpn_protocols(["h2"])

    async def main() -> None:
        async with talking(address, server_tls, client_tls) as (_, _, channel, stub):
            await over_rdma(channel)
            await in_each_way(stub)

    await switched(main)


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_a_call_that_is_given_up_is_canceled(
    address: str, switched: Switched, how: str
) -> None:
    async def main() -> None:
        async with talking(address) as (_, echo, _, stub):
            if how == "deadline":
                limit_s = 0.2
                while not echo.waits.is_set():  # a busy machine may need longer to begin
                    with pytest.raises(asyncio.TimeoutError):
                        await stub.one(value(b""), timeout=limit_s)
                    limit_s *= 2
            else:
                calling = asyncio.create_task(stub.one(value(b"")))
                await echo.waits.wait()
                calling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await calling
            await echo.canceled.wait()
            await in_each_way(stub)

    await switched(main)


async def test_a_connection_that_breaks(address: str, switched: Switched) -> None:
    """The call that waits is told, and the next one has another connection."""

    async def main() -> None:
        async with talking(address) as (server, echo, _, stub):
            calling = asyncio.create_task(stub.one(value(b"")))
            await echo.waits.wait()
            listening: Any = server._server
            listening.abort_clients()
            with pytest.raises(StreamTerminatedError):
                await calling
            await echo.canceled.wait()
            await in_each_way(stub)

    await switched(main)
