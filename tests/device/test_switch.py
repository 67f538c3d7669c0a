"""The switch: a program's own asyncio calls go over RDMA where a device is, and say so."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

import aiordma
from aiordma.link.reach import device_at, device_towards
from tests.device.shared import name_of_device
from tests.device.switching import LIMIT_S, Switched

pytestmark = pytest.mark.device

LOCALHOST = "127.0.0.1"


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read())
    writer.close()
    await writer.wait_closed()


async def talk(host: Any, target: str, **options: Any) -> tuple[bytes, str | None]:
    """What an echo server answers, and over what; in asyncio's own calls."""
    server = await asyncio.start_server(echo, host, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(target, port, **options)
        writer.write(b"hello")
        writer.write_eof()
        answer = await reader.read()
        backend = writer.get_extra_info("backend")
        writer.close()
        await writer.wait_closed()
    return answer, backend


@pytest.mark.kernel
async def test_devices_of_addresses(address: str, is_siw: bool) -> None:
    name = name_of_device(is_siw)
    assert await device_at(address) == name
    assert await device_at("0.0.0.0") == await device_at("::") == name
    assert await device_at(LOCALHOST) is None
    assert await device_at("::1") is None
    assert await device_at("192.0.2.1") is None
    assert await device_towards((address, 1)) == name
    neighbor = f"{address.rpartition('.')[0]}.77"
    assert await device_towards((neighbor, 0)) == name
    assert await device_towards((LOCALHOST, 1)) is None
    assert await device_towards((LOCALHOST, 1), address) == name
    assert await device_towards(("192.0.2.1", 1)) is None


@pytest.mark.smoke
async def test_an_address_with_a_device(
    switched: Switched, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")
    assert await switched(lambda: talk(address, address)) == (b"hello", "rdma")
    said = [record.getMessage() for record in caplog.records if "over RDMA" in record.getMessage()]
    assert [text.partition(" over RDMA: ")[0] for text in said] == [
        f"listening on {address} port 0",
        said[1].partition(" over RDMA: ")[0],
    ]
    assert said[1].startswith(f"connecting to {address} port ")
    assert all(text.endswith("0") for text in said)  # rxe0, siw0


async def test_a_wildcard_is_for_rdma(switched: Switched, address: str) -> None:
    for wildcard in (None, "", "0.0.0.0"):
        assert await switched(partial(talk, wildcard, address)) == (b"hello", "rdma")


async def test_a_rule_of_the_program(switched: Switched, address: str) -> None:
    asked: list[tuple[str, int]] = []

    def rule(host: str, port: int) -> bool:
        asked.append((host, port))
        return False

    assert await switched(lambda: talk(address, address), rule) == (b"hello", None)
    assert asked[0] == (address, 0)
    assert asked[1][0] == address
    everything = await switched(lambda: talk(address, address), lambda host, port: True)
    assert everything == (b"hello", "rdma")


@pytest.mark.kernel
async def test_a_server_is_not_on_both_ways(switched: Switched, address: str) -> None:
    async def mixed() -> None:
        with pytest.raises(ValueError, match=rf"not for RDMA: {LOCALHOST}"):
            await asyncio.start_server(echo, [address, LOCALHOST], 0)

    await switched(mixed)


async def test_a_refusal_is_not_tried_over_tcp(
    switched: Switched, address: str, is_siw: bool
) -> None:
    """A TCP server listens there, and is not asked."""

    async def refused() -> None:
        loop: Any = asyncio.get_running_loop()  # all_errors: Python 3.12
        with socket.create_server((address, 0)) as listening:
            listening.setblocking(False)
            port = listening.getsockname()[1]
            if is_siw:
                # iWARP is TCP below: its connection would reach the server, and wait there.
                listening.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(address, port)
            with pytest.raises(ExceptionGroup) as caught:
                await loop.create_connection(asyncio.Protocol, address, port, all_errors=True)
            assert caught.group_contains(ConnectionRefusedError)
            if not is_siw:
                with pytest.raises(BlockingIOError):
                    listening.accept()

    await switched(refused)


async def test_sockets_are_the_loops_own(switched: Switched, address: str, tmp_path: Path) -> None:
    async def with_sockets() -> None:
        path = str(tmp_path / "socket")
        with socket.create_server((address, 0)) as listening:
            async with await asyncio.start_server(echo, sock=listening):
                sock = socket.create_connection(listening.getsockname())
                _, writer = await asyncio.open_connection(sock=sock)
                assert writer.get_extra_info("backend") is None
                writer.close()
                await writer.wait_closed()
        async with await asyncio.start_unix_server(echo, path):
            _, writer = await asyncio.open_unix_connection(path)
            assert writer.get_extra_info("backend") is None
            writer.close()
            await writer.wait_closed()

    await switched(with_sockets)


async def exchange(server: Any, target: str, port: int) -> str | None:
    """Over what a client of `echo` has talked to it."""
    async with server:
        reader, writer = await asyncio.open_connection(target, port)
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"hello"
        backend: str | None = writer.get_extra_info("backend")
        writer.close()
        await writer.wait_closed()
    return backend


@pytest.mark.parametrize("reuse", [0, 1])
async def test_h06_a_bound_socket_is_served_over_rdma(
    switched: Switched, address: str, reuse: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")

    async def bound() -> None:
        for host in (address, "0.0.0.0"):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            sock.bind((host, 0))
            name = sock.getsockname()
            server = await asyncio.start_server(echo, sock=sock)
            assert f"listening on {name[0]} port {name[1]} over RDMA" in caplog.text
            assert [each.getsockname() for each in server.sockets] == [name]
            assert await exchange(server, address, name[1]) == "rdma"
            assert sock.fileno() == -1, "as asyncio's server, it closes its socket in the end"

    await switched(bound)


async def test_h06_a_socket_that_is_not_bound(switched: Switched, address: str) -> None:
    async def unbound() -> None:
        for family in (socket.AF_INET, socket.AF_INET6):
            sock = socket.socket(family)
            server = await asyncio.start_server(echo, sock=sock)
            port = sock.getsockname()[1]
            assert server.sockets[0].getsockname()[1] == port
            assert await exchange(server, address, port) == "rdma"

    await switched(unbound)


async def test_h06_sockets_that_are_in_use_stay_and_say_so(
    switched: Switched, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")

    async def in_use() -> None:
        loop: Any = asyncio.get_running_loop()
        with socket.create_server((address, 0)) as listening:
            where = listening.getsockname()
            server = await asyncio.start_server(echo, sock=listening)
            async with server:
                client = socket.create_connection(where)
                with pytest.raises(ValueError, match="it is connected already"):
                    await aiordma.create_server(asyncio.Protocol, sock=client)
                with pytest.raises(ValueError, match="it listens already"):
                    await aiordma.create_server(asyncio.Protocol, sock=listening)
                with (
                    socket.socket(type=socket.SOCK_DGRAM) as datagrams,
                    pytest.raises(ValueError, match="no stream socket of IPv4"),
                ):
                    await aiordma.create_server(asyncio.Protocol, sock=datagrams)
                _, writer = await asyncio.open_connection(sock=client)
                assert writer.get_extra_info("backend") is None
                writer.close()
                await writer.wait_closed()
        with socket.socket() as sock:
            for create in (loop.create_server, aiordma.create_server):
                with pytest.raises(ValueError, match="host/port and sock"):
                    await create(asyncio.Protocol, address, 0, sock=sock)

    await switched(in_use)
    said = [record.getMessage() for record in caplog.records if record.name == "aiordma"]
    assert [text.partition(" by ")[0] for text in said] == ["a server", "a connection"]
    assert all(text.endswith("not over RDMA: its socket is the program's own") for text in said)


async def test_h06_a_port_that_is_taken(switched: Switched, address: str) -> None:
    """The socket is its owner's until the server is there."""

    async def taken() -> None:
        async with await asyncio.start_server(echo, address, 0) as server:
            port = server.sockets[0].getsockname()[1]
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

                async def serve() -> None:
                    # On iWARP the first server has the port for TCP, too.
                    sock.bind((address, port))
                    await asyncio.start_server(echo, sock=sock)

                with pytest.raises(OSError, match=rf"Errno {errno.EADDRINUSE}\]"):
                    await serve()
                assert sock.fileno() != -1

    await switched(taken)


async def test_h03_sockets_of_both_ends(switched: Switched, address: str) -> None:
    """What programs ask the socket of a connection, of a server and beneath TLS."""
    authority = trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(address).configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)

    async def ask(**client: Any) -> None:
        names: asyncio.Queue[Any] = asyncio.Queue()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await names.put((sock.getsockname(), sock.getpeername()))
            await reader.read()
            writer.close()
            await writer.wait_closed()

        context = theirs if client else None
        async with await asyncio.start_server(serve, address, 0, ssl=context) as server:
            (listening,) = server.sockets
            assert (listening.family, listening.fileno()) == (socket.AF_INET, -1)
            where = listening.getsockname()
            assert where[0] == address
            assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            _, writer = await asyncio.open_connection(*where, **client)
            sock = writer.get_extra_info("socket")
            assert (sock.family, sock.type) == (socket.AF_INET, socket.SOCK_STREAM)
            assert sock.proto == socket.IPPROTO_TCP
            assert sock.getpeername() == where == writer.get_extra_info("peername")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            assert await names.get() == (where, sock.getsockname())
            writer.close()
            await writer.wait_closed()

    await switched(ask)
    await switched(lambda: ask(ssl=ours))


async def test_arguments_of_asyncio(switched: Switched, address: str) -> None:
    async def picky() -> None:
        options = {
            "family": socket.AF_INET,
            "proto": socket.IPPROTO_TCP,
            "local_addr": (address, 0),
            "happy_eyeballs_delay": 0.25,
            "interleave": 1,
        }
        assert await talk(address, address, **options) == (b"hello", "rdma")
        server = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, address, 0, reuse_address=True, reuse_port=None, backlog=7
        )
        server.close()
        await server.wait_closed()

    await switched(picky)


@asynccontextmanager
async def opened(
    host: str, port: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, which the block closes."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def test_h05_a_file_is_sent_from_its_offset(
    switched: Switched, address: str, is_uvloop: bool, tmp_path: Path
) -> None:
    """Wherever the file is: one that was just written is at its end."""

    async def send(host: str) -> list[bytes]:
        received: list[bytes] = []
        loop = asyncio.get_running_loop()

        async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            received.append(await reader.read())
            writer.close()

        async with await asyncio.start_server(keep, host, 0) as server:
            port = server.sockets[0].getsockname()[1]
            with (tmp_path / "file").open("wb+") as file:
                file.write(b"0123456789" * 1000)
                file.flush()
                for offset, count in ((0, None), (0, 3), (7, 3), (9998, None)):
                    async with opened(host, port) as (reader, writer):
                        await loop.sendfile(writer.transport, file, offset, count)
                        writer.write_eof()
                        assert await reader.read() == b""
            with (tmp_path / "file").open() as text:
                async with opened(host, port) as (_, writer):
                    with pytest.raises(ValueError, match="binary mode"):
                        await loop.sendfile(writer.transport, text)  # type: ignore[arg-type]
        return received[:4]  # the end of the last connection may come after that of the server

    if is_uvloop:
        with pytest.raises(NotImplementedError):
            await switched(lambda: send(address))
        return
    expected = [b"0123456789" * 1000, b"012", b"789", b"89"]
    assert await switched(lambda: send(LOCALHOST)) == expected
    assert await switched(lambda: send(address)) == expected


@pytest.mark.kernel
async def test_tls_is_started_on_both_ways(switched: Switched, address: str) -> None:
    authority = trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(address, LOCALHOST).configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)

    async def upgrade(host: str) -> tuple[bytes, str, str | None]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(8)
            writer.write(b"go on")
            await writer.drain()
            loop = asyncio.get_running_loop()
            protocol = writer.transport.get_protocol()
            transport = await loop.start_tls(writer.transport, protocol, theirs, server_side=True)
            assert transport is not None
            transport.write(b"secret")
            transport.close()
            await writer.wait_closed()  # its own transport ends with the one of TLS

        async with await asyncio.start_server(serve, host, 0) as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"STARTTLS")
            assert await reader.readexactly(5) == b"go on"
            await writer.start_tls(ours, server_hostname=host)
            answer = await reader.read()
            version = writer.get_extra_info("ssl_object").version()
            backend = writer.get_extra_info("backend")
            writer.close()
            await writer.wait_closed()
        return answer, version, backend

    assert await switched(lambda: upgrade(address)) == (b"secret", "TLSv1.3", "rdma")
    assert await switched(lambda: upgrade(LOCALHOST)) == (b"secret", "TLSv1.3", None)


def test_a_policy_for_a_program_that_knows_nothing(address: str, is_uvloop: bool) -> None:
    program = textwrap.dedent(f"""
        import asyncio
        import aiordma.streams.policy as policy

        async def main():
            server = await asyncio.start_server(lambda _, writer: writer.close(), {address!r}, 0)
            async with server:
                _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                print(writer.get_extra_info("backend"))
                writer.close()
                await writer.wait_closed()

        asyncio.set_event_loop_policy(policy.event_loop_policy(uvloop={is_uvloop}))
        asyncio.run(main())
    """)
    done = subprocess.run(
        # The word of Python 3.14 and later that policies have no future is known.
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "rdma\n", "")
