"""aiohttp and httpx over RDMA: requests, TLS, errors in the words of each, and what is reused."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO

import aiohttp
import httpcore
import httpx
import pytest
import trustme
from aiohttp import web

from aiordma.contrib.aiohttp import RdmaConnector, RdmaSite
from aiordma.contrib.httpx import RdmaBackend, RdmaHTTPTransport
from aiordma.streams.policy import new_event_loop
from aiordma.streams.stream_config import StreamConfig
from tests.device.oracle import until

pytestmark = pytest.mark.device

LARGE = 4 << 20
CONFIG = StreamConfig(keepalive_s=None)


@dataclass
class TLS:
    """Contexts of a server and of clients that trust it."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, address: str) -> TLS:
    certificate = authority.issue_cert(address)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    der = ssl.PEM_cert_to_DER_cert(certificate.cert_chain_pems[0].bytes().decode())
    return TLS(server, client, der)


async def about(request: web.Request) -> web.Response:
    """Who asks, over what, and how much came."""
    assert request.transport is not None
    peer = request.transport.get_extra_info("peername")
    return web.json_response(
        {
            "peer": list(peer[:2]),
            "backend": request.transport.get_extra_info("backend"),
            "scheme": request.scheme,
            "count": len(await request.read()),
        }
    )


async def large(request: web.Request) -> web.StreamResponse:
    """A long answer, in pieces."""
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(LARGE >> 16):
        await response.write(bytes(1 << 16))
    await response.write_eof()
    return response


async def never(request: web.Request) -> web.Response:
    """No answer until the client has gone."""
    await asyncio.Event().wait()
    raise AssertionError


async def last(request: web.Request) -> web.Response:
    """An answer after which the server closes, without a word about it."""
    response = web.Response(text="bye")
    await response.prepare(request)
    await response.write_eof()
    assert request.transport is not None
    request.transport.close()
    return response


async def talk(request: web.Request) -> web.WebSocketResponse:
    """A web socket that gives each message back."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        await socket.send_bytes(message.data)
    return socket


@contextlib.asynccontextmanager
async def serving(address: str, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server of these; its URL."""
    app = web.Application(client_max_size=2 * LARGE)
    for handler in (about, large, never, last, talk):
        app.router.add_route("*", f"/{handler.__name__}", handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    site = RdmaSite(runner, address, 0, ssl_context=context, config=CONFIG)
    await site.start()
    assert runner.addresses[0][0] == address
    try:
        yield site.name
    finally:
        await runner.cleanup()
        await site.wait_closed()


@contextlib.asynccontextmanager
async def with_aiohttp() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=RdmaConnector(config=CONFIG)) as session:
        yield session


@contextlib.asynccontextmanager
async def with_httpx(verify: ssl.SSLContext | bool = True) -> AsyncIterator[httpx.AsyncClient]:
    transport = RdmaHTTPTransport(config=CONFIG, verify=verify)
    async with httpx.AsyncClient(transport=transport) as client:
        yield client


async def test_requests_of_aiohttp(address: str) -> None:
    async with serving(address) as url, with_aiohttp() as session:
        async with session.get(f"{url}/about") as response:
            first = await response.json()
        async with session.post(f"{url}/about", data=BytesIO(bytes(LARGE))) as response:
            second = await response.json()
        assert first["backend"] == second["backend"] == "rdma"
        assert second["count"] == LARGE
        assert first["peer"] == second["peer"], "the connection is kept"
        async with session.get(f"{url}/large") as response:
            assert await response.read() == bytes(LARGE)


async def test_web_sockets_of_aiohttp(address: str) -> None:
    async with (
        serving(address) as url,
        with_aiohttp() as session,
        session.ws_connect(f"{url}/talk") as socket,
    ):
        for size in (0, 1, 100_000):
            await socket.send_bytes(bytes(size))
            assert await socket.receive_bytes(timeout=30) == bytes(size)


async def test_tls_of_aiohttp(address: str, tls: TLS) -> None:
    async with serving(address, tls.server) as url, with_aiohttp() as session:
        assert url.startswith("https://")
        async with session.get(f"{url}/about", ssl=tls.client) as response:
            about = await response.json()
        assert (about["backend"], about["scheme"]) == ("rdma", "https")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get(f"{url}/about")
        with pytest.raises(aiohttp.ServerFingerprintMismatch):
            await session.get(f"{url}/about", ssl=aiohttp.Fingerprint(bytes(32)))


async def test_errors_of_aiohttp(address: str) -> None:
    async with with_aiohttp() as session:
        with pytest.raises(aiohttp.ClientConnectorError) as caught:
            await session.get(f"http://{address}:1/")
        assert isinstance(caught.value.os_error, ConnectionRefusedError)
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get("http://192.0.2.1/")
    async with serving(address) as url, with_aiohttp() as session:
        with pytest.raises(TimeoutError):
            await session.get(f"{url}/never", timeout=aiohttp.ClientTimeout(total=0.2))


async def test_requests_of_httpx(address: str) -> None:
    async with serving(address) as url, with_httpx() as client:
        first = (await client.get(f"{url}/about")).json()
        second = (await client.post(f"{url}/about", content=bytes(LARGE))).json()
        assert first["backend"] == second["backend"] == "rdma"
        assert second["count"] == LARGE
        assert first["peer"] == second["peer"], "the connection is kept"
        assert (await client.get(f"{url}/large")).content == bytes(LARGE)


async def test_httpx_notices_that_a_connection_has_ended(address: str) -> None:
    async with serving(address) as url, with_httpx() as client:
        response = await client.get(f"{url}/last")
        assert response.text == "bye"
        stream = response.extensions["network_stream"]
        # Who asks again before the end has come finds that out the hard way, as over TCP.
        await until(lambda: stream.get_extra_info("is_readable"))
        assert (await client.get(f"{url}/about")).json()["backend"] == "rdma"


async def test_tls_of_httpx(address: str, tls: TLS) -> None:
    async with serving(address, tls.server) as url:
        async with with_httpx(tls.client) as client:
            response = await client.get(f"{url}/about")
            about = response.json()
            assert (about["backend"], about["scheme"]) == ("rdma", "https")
            stream = response.extensions["network_stream"]
            assert stream.get_extra_info("ssl_object").version() == "TLSv1.3"
            assert stream.get_extra_info("server_addr")[0] == address
        async with with_httpx() as client:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await client.get(f"{url}/about")


async def test_errors_of_httpx(address: str) -> None:
    async with with_httpx() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://{address}:1/")
        with pytest.raises(httpx.ConnectError):
            await client.get("http://192.0.2.1/")
    async with serving(address) as url, with_httpx() as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get(f"{url}/never", timeout=httpx.Timeout(10, read=0.2))


async def test_what_a_backend_cannot_do(address: str) -> None:
    backend = RdmaBackend()
    with pytest.raises(httpcore.ConnectError, match="UNIX"):
        await backend.connect_unix_socket("/tmp/x")
    with pytest.raises(ValueError, match="no socket"):
        await backend.connect_tcp(address, 1, socket_options=[(1, 2, 3)])


async def test_a_server_that_knows_nothing(address: str, request: pytest.FixtureRequest) -> None:
    """aiohttp's own site, on a loop with the switch."""

    async def main() -> str:
        app = web.Application()
        app.router.add_get("/about", about)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, address, 0)
        await site.start()
        async with with_httpx() as client:
            answer = (await client.get(f"{site.name}/about")).json()
        await runner.cleanup()
        return str(answer["backend"])

    def run() -> str:
        uvloop = request.config.getoption("--loop") == "uvloop"
        with asyncio.Runner(loop_factory=lambda: new_event_loop(uvloop=uvloop)) as runner:
            return runner.run(asyncio.wait_for(main(), 60))

    assert await asyncio.to_thread(run) == "rdma"
