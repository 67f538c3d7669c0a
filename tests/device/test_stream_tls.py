"""TLS over streams: from the first byte and in the middle, on both ends and both loops."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any, NamedTuple

import pytest
import trustme

import aiordma
from aiordma import RdmaServer, RdmaStreamReader, RdmaStreamWriter, RdmaTransport, StreamConfig
from tests.device.oracle import until
from tests.device.streaming import Note, noted
from tests.inside.link import limit_tls
from tests.inside.streams import active_of, tls_places_of

pytestmark = pytest.mark.device

NAME = "stream.example"


class Contexts(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext


@pytest.fixture(scope="module")
def contexts() -> Contexts:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(NAME).configure_cert(server)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(client)
    return Contexts(server, client)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_from_the_first_byte(address: str, contexts: Contexts) -> None:
    data = bytes(range(256)) * 4000
    async with await aiordma.start_server(copy, address, 0, ssl=contexts.server) as server:
        reader, writer = await aiordma.open_connection(
            address, server.port, ssl=contexts.client, server_hostname=NAME
        )
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert writer.get_extra_info("cipher")
        assert writer.get_extra_info("device")  # what carries it, through TLS
        assert not writer.can_write_eof()
        into = bytearray(len(data))

        async def receive() -> None:
            at = 0
            with memoryview(into) as view:
                while at < len(into):
                    at += await reader.readinto(view[at:])

        async def send() -> None:
            for at in range(0, len(data), 100_000):
                writer.write(data[at : at + 100_000])
                await writer.drain()

        await asyncio.gather(send(), receive())
        assert into == data
        writer.close()
        await writer.wait_closed()
        assert await reader.read() == b""


@pytest.mark.parametrize("when", ["before the handshake", "behind it"])
async def test_a_server_that_closes_serves_its_client(
    address: str, contexts: Contexts, when: str
) -> None:
    """As over TCP: the program has the connection before the server's own task goes on."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.close()
        await copy(reader, writer)

    tls: Any = {"ssl": contexts.client, "server_hostname": NAME}
    server = await aiordma.start_server(answer, address, 0, ssl=contexts.server)
    async with asyncio.timeout(60):
        if when == "behind it":
            reader, writer = await aiordma.open_connection(address, server.port, **tls)
        else:
            reader, writer = await aiordma.open_connection(address, server.port)
            await until(lambda: active_of(server) == 1)
            server.close()
            await writer.start_tls(contexts.client, server_hostname=NAME)
        for line in (b"one\n", b"two\n"):
            writer.write(line)
            assert await reader.readline() == line
            assert not server.is_serving()
        writer.close()
        await writer.wait_closed()
        await server.wait_closed()


async def test_a_connection_that_waits_for_tls_when_its_server_closes(
    address: str, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exists, and so it goes on."""
    limit_tls(monkeypatch, most_of_one=1, pressed_s=0.2)

    async def answer(reader: RdmaStreamReader, writer: RdmaStreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # one is dropped
            await writer.start_tls(contexts.server)
            await copy(reader, writer)

    server = await aiordma.start_server(answer, address, 0)
    async with asyncio.timeout(60):
        _, silent = await aiordma.open_connection(address, server.port)
        await until(lambda: tls_places_of(server).open == 1)
        reader, writer = await aiordma.open_connection(address, server.port)
        await until(lambda: tls_places_of(server).waiting == 1)
        server.close()
        await writer.start_tls(contexts.client, server_hostname=NAME)
        writer.write(b"in?")
        assert await reader.readexactly(3) == b"in?"
        for each in (silent, writer):
            each.close()
            await each.wait_closed()
        await server.wait_closed()


async def test_a_name_that_is_not_the_servers(address: str, contexts: Contexts) -> None:
    async with await aiordma.create_server(Note, address, 0, ssl=contexts.server) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            await aiordma.create_connection(
                Note, address, server.port, ssl=contexts.client, server_hostname="other.example"
            )
        with pytest.raises(ssl.SSLCertVerificationError):
            await aiordma.create_connection(Note, address, server.port, ssl=True)


async def test_a_handshake_that_nobody_answers(address: str, contexts: Contexts) -> None:
    async with await aiordma.create_server(Note, address, 0) as server:
        with pytest.raises(ConnectionAbortedError, match="SSL handshake"):
            await aiordma.create_connection(
                Note,
                address,
                server.port,
                ssl=contexts.client,
                server_hostname=NAME,
                ssl_handshake_timeout=0.5,
            )


async def upgraded(
    address: str, contexts: Contexts, config: StreamConfig | None = None
) -> tuple[RdmaServer, Any]:
    """A server that says hello in the clear and goes over to TLS."""

    async def answer(reader: RdmaStreamReader, writer: RdmaStreamWriter) -> None:
        assert await reader.readline() == b"STARTTLS\n"
        writer.write(b"go\n")
        with contextlib.suppress(ConnectionError):  # one test breaks it off
            await writer.start_tls(contexts.server)
            await copy(reader, writer)

    server = await aiordma.start_server(answer, address, 0, config=config)
    reader, writer = await aiordma.open_connection(address, server.port)
    writer.write(b"STARTTLS\n")
    assert await reader.readline() == b"go\n"
    await writer.start_tls(contexts.client, server_hostname=NAME)
    return server, (reader, writer)


async def test_in_the_middle(address: str, contexts: Contexts) -> None:
    server, (reader, writer) = await upgraded(address, contexts)
    async with server:
        assert writer.get_extra_info("ssl_object") is not None
        writer.write(b"secret\n")
        assert await reader.readline() == b"secret\n"
        into = bytearray(4)
        writer.write(b"more")
        assert await reader.readinto(into) == 4
        assert into == b"more"
        writer.close()
        await writer.wait_closed()


async def test_start_tls_after_the_end_of_the_peer(address: str, contexts: Contexts) -> None:
    """The new protocol gets the end as well, as over TCP, and not after the time of a handshake."""

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"go\n")
        writer.close()

    async with await aiordma.start_server(leave, address, 0) as server:
        reader, writer = await aiordma.open_connection(address, server.port)
        writer.write(b"STARTTLS\n")
        assert await reader.read() == b"go\n"
        with pytest.raises(ConnectionError):
            await writer.start_tls(contexts.client, server_hostname=NAME)
        writer.close()


async def test_eof_received_is_called_again_when_reading_resumes(address: str) -> None:
    class Open(Note):
        def eof_received(self) -> bool:
            super().eof_received()
            return True

    protocols: list[Open] = []

    def make() -> Open:
        protocols.append(Open())
        return protocols[-1]

    server = await aiordma.create_server(make, address, 0)
    _, client = await aiordma.create_connection(Open, address, server.port)
    client.transport.write_eof()
    await until(lambda: any("eof" in each.calls for each in protocols))
    transport, later = protocols[0].transport, Open()
    transport.pause_reading()
    transport.set_protocol(later)
    transport.resume_reading()
    await until(lambda: "eof" in later.calls)
    transport.abort()
    client.transport.abort()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("side", ["server", "client"])
async def test_a_program_that_closes_twice_at_once(
    address: str, contexts: Contexts, side: str
) -> None:
    class Twice(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()
            transport.close()

    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    ours, theirs = (Twice, Note) if side == "server" else (Note, Twice)
    server = await aiordma.create_server(ours, address, 0, ssl=contexts.server)
    transport, _ = await aiordma.create_connection(
        theirs, address, server.port, ssl=contexts.client, server_hostname=NAME
    )
    transport.abort()
    server.close()
    await server.wait_closed()
    assert problems == []


async def test_start_tls_of_what_is_no_transport(address: str, contexts: Contexts) -> None:
    async with noted(address) as both:
        transport = both.client.transport
        assert isinstance(transport, RdmaTransport)
        with pytest.raises(TypeError, match="SSLContext"):
            await aiordma.start_tls(transport, both.client, True)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="not supported"):
            await aiordma.start_tls(asyncio.Transport(), both.client, contexts.client)


async def test_a_peer_that_breaks_off(address: str, contexts: Contexts) -> None:
    server, (reader, writer) = await upgraded(address, contexts, StreamConfig(linger_s=0))
    async with server:
        server.abort_clients()
        with pytest.raises(ConnectionError):
            await reader.read()
        writer.close()
        with pytest.raises(ConnectionError):
            await writer.wait_closed()
