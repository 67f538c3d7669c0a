"""The switch where it has nothing to do: loopback is asyncio's own, whatever the machine has."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest
import trustme

from aiordma.errors import RdmaError
from aiordma.streams.policy import (
    RdmaEventLoop,
    RdmaLoopMixin,
    event_loop_policy,
    new_event_loop,
)

HOST = "127.0.0.1"
LIMIT_S = 30


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs a coroutine on a loop with the switch."""

    def run(main: Any, **options: Any) -> Any:
        factory = lambda: new_event_loop(uvloop=request.param, **options)  # noqa: E731
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(main, LIMIT_S))

    return run


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readline())
    writer.close()
    await writer.wait_closed()


async def talk(**options: Any) -> tuple[bytes, Any]:
    """What an echo server answers, and over what."""
    server = await asyncio.start_server(answer, HOST, 0, reuse_address=True)
    async with server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(HOST, port, **options)
        writer.write(b"hello\n")
        data = await reader.read()
        backend = writer.get_extra_info("backend")
        writer.close()
        await writer.wait_closed()
    return data, backend


def test_loopback_is_the_loops_own(
    runner: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")
    assert runner(talk(local_addr=(HOST, 0))) == (b"hello\n", None)
    said = [record.getMessage() for record in caplog.records if record.name == "aiordma"]
    assert said[0] == f"listening on {HOST} port 0 not over RDMA: no RDMA device for the address"
    assert said[1].startswith(f"connecting to {HOST} port ")
    assert said[1].endswith(" not over RDMA: no RDMA device for the address")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said since the last time."""
    said = [record.getMessage() for record in caplog.records if record.name == "aiordma"]
    caplog.clear()
    return said


def test_h06_what_stays_on_tcp_says_so(
    runner: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each connection and each server, whichever call it is made by."""
    caplog.set_level(logging.INFO, "aiordma")
    own = "not over RDMA: its socket is the program's own"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server((HOST, 0)) as listening:
            listening.setblocking(False)
            here = listening.getsockname()
            there = f"to {HOST} port {here[1]}"

            # A connection by hand, on both sides, and handed to the loop on both.
            with socket.socket() as client:
                client.setblocking(False)
                await loop.sock_connect(client, here)
                assert told(caplog) == [f"a connection by sock_connect {there} {own}"]
                accepted, _ = await loop.sock_accept(listening)
                assert told(caplog) == [f"a server by sock_accept on {here} {own}"]
                peer = f"to {HOST} port {client.getsockname()[1]}"
                transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
                assert told(caplog) == [f"a connection by connect_accepted_socket {peer} {own}"]
                transport.close()
                _, writer = await asyncio.open_connection(sock=client)
                assert told(caplog) == [f"a connection by create_connection(sock=) {there} {own}"]
                writer.close()
                await writer.wait_closed()

            # The server is told of once, not for each client.
            with socket.create_connection(here):
                (await loop.sock_accept(listening))[0].close()
            assert told(caplog) == []

            # Watched by the program itself: once, until the number is another socket's.
            loop.add_reader(listening, print)
            loop.remove_reader(listening)
            assert told(caplog) == []
            with socket.create_server((HOST, 0)) as other:
                for watched in (other, other.fileno()):
                    loop.add_reader(watched, print)
                    loop.remove_reader(watched)
                name = other.getsockname()
            assert told(caplog) == [f"a socket by add_reader on {name} {own}"]
            with socket.create_connection(here) as client:
                loop.add_writer(client.fileno(), lambda: None)
                loop.remove_writer(client.fileno())
            assert told(caplog) == [f"a socket by add_writer {there} {own}"]

            server = await asyncio.start_server(answer, sock=listening)
            what = "a server by create_server(sock=), which listens already"
            assert told(caplog) == [f"{what} on {here} {own}"]
            server.close()
            await server.wait_closed()

    runner(main())


def test_h06_what_is_not_tcp_is_no_news(
    runner: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        with here, there, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
            for sock in (here, there, datagrams):
                sock.setblocking(False)
                loop.add_reader(sock, print)
                loop.remove_reader(sock)
            assert told(caplog) == []
        transport, _ = await loop.create_datagram_endpoint(
            asyncio.DatagramProtocol, local_addr=(HOST, 0)
        )
        assert told(caplog) == ["a datagram endpoint not over RDMA: the switch is for streams"]
        transport.close()

    runner(main())


@pytest.mark.parametrize(
    ("host", "named"),
    [
        (None, "every address"),
        ("", "every address"),
        (["127.0.0.1", "127.0.0.2"], "127.0.0.1, 127.0.0.2"),
    ],
)
def test_addresses_are_named(
    host: Any, named: str, runner: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")

    async def main() -> None:
        server = await asyncio.start_server(answer, iter(host) if host else host, 0)
        assert server.sockets
        assert told(caplog)[0].startswith(f"listening on {named} port 0 not over RDMA: ")
        server.close()
        await server.wait_closed()

    runner(main())


def test_h06_a_bound_socket_of_loopback(
    runner: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")

    async def main() -> None:
        sock = socket.socket()
        sock.bind((HOST, 0))
        _, port = sock.getsockname()
        server = await asyncio.start_server(answer, sock=sock)
        why = "no RDMA device for the address"
        assert told(caplog) == [f"listening on {HOST} port {port} not over RDMA: {why}"]
        reader, writer = await asyncio.open_connection(HOST, port)
        assert told(caplog) == [f"connecting to {HOST} port {port} not over RDMA: {why}"]
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    runner(main())


def test_a_rule_is_asked_with_numbers(
    runner: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")
    asked: list[tuple[str, int]] = []

    def never(host: str, port: int) -> bool:
        asked.append((host, port))
        return False

    assert runner(talk(), when=never) == (b"hello\n", None)
    assert asked[0] == (HOST, 0)
    assert asked[1][0] == HOST
    assert asked[1][1] > 0
    assert "not over RDMA: the program's rule" in caplog.text


def test_always_does_not_fall_back(runner: Callable[..., Any]) -> None:
    """A TCP server is there, and is not what the client gets."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        base: Any = super(RdmaLoopMixin, loop)
        server = await base.create_server(asyncio.Protocol, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        try:
            with pytest.raises((OSError, RdmaError)):
                await asyncio.wait_for(asyncio.open_connection(HOST, port), LIMIT_S / 2)
        finally:
            server.close()
            await server.wait_closed()

    runner(main(), when="always")


def test_tls_of_the_loops_own(runner: Callable[..., Any]) -> None:
    authority = trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)

    async def main() -> bytes:
        server = await asyncio.start_server(answer, HOST, 0, ssl=theirs)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(HOST, port)
            await writer.start_tls(ours, server_hostname=HOST)
            writer.write(b"hello\n")
            data = await reader.readline()
            writer.close()
            await writer.wait_closed()
        return data

    assert runner(main()) == b"hello\n"


@pytest.mark.parametrize("uvloop", [False, True])
def test_a_rule_that_is_none_leaves_no_loop(uvloop: bool) -> None:
    for wrong in ("sometimes", None, 1):
        with pytest.raises(ValueError, match='"device", "always" or a function'):
            new_event_loop(when=wrong, uvloop=uvloop)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match='"device", "always" or a function'):
            event_loop_policy(when=wrong, uvloop=uvloop)  # type: ignore[arg-type]


# Python 3.14 and later say that policies have no future.
@pytest.mark.filterwarnings("ignore:.*Policy:DeprecationWarning")
def test_the_loops_of_a_policy() -> None:
    for uvloop in (False, True):
        loop = event_loop_policy(uvloop=uvloop).new_event_loop()
        assert isinstance(loop, RdmaLoopMixin)
        assert isinstance(loop, RdmaEventLoop) != uvloop
        loop.close()
