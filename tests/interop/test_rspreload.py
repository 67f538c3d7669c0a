"""Programs that know TCP alone, under librspreload.

An echo server and its clients, socat, and curl or Python's http.client.

aiordma listens on the RDMA device and nowhere else, so a connection that is made is no TCP
connection; the programs would fall back to TCP without a word.
"""

from __future__ import annotations

import random
import sys
from asyncio import StreamReader, StreamWriter
from pathlib import Path

import pytest

from tests.interop.preload import IS_LATER, LIBRARY, build, fed
from tests.interop.program import assert_bytes, running
from tests.interop.streaming import Dialed, dialed, serving_one

#: More than the buffers on the way hold, of either side.
LONG = random.Random(4).randbytes(3_000_000)
SHORT = random.Random(5).randbytes(100_000)


@pytest.fixture(scope="session")
def tcp_echo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the C program."""
    return build(Path(__file__).parent / "tcp_echo.c", tmp_path_factory.mktemp("tcp_echo"))


async def echo(reader: StreamReader, writer: StreamWriter) -> int:
    """Echo until the end of the stream; returns the number of bytes."""
    total = 0
    while data := await reader.read(50_000):
        writer.write(data)
        await writer.drain()
        total += len(data)
    return total


async def echo_with_eof(reader: StreamReader, writer: StreamWriter) -> int:
    """The same, and says that nothing more comes before it closes."""
    total = await echo(reader, writer)
    writer.write_eof()
    return total


async def assert_echoed(
    address: str, command: tuple[str, ...], data: bytes, tmp_path: Path
) -> None:
    """A program that sends `data` to our server gets it back, then the end of the stream."""
    source, result = tmp_path / "source", tmp_path / "result"
    source.write_bytes(data)
    async with serving_one(address, echo_with_eof) as served:
        where = tuple(word.format(address=address, port=served.port) for word in command)
        async with running(*fed(where, source, result), LD_PRELOAD=LIBRARY) as client:
            assert await served.ended == len(data)
            await client.finish()
    assert_bytes(result.read_bytes(), data)


async def test_aiordma_serves_a_client_that_half_closes(
    address: str, tcp_echo: str, tmp_path: Path
) -> None:
    command = (tcp_echo, "client", "{address}", "{port}")
    await assert_echoed(address, command, SHORT, tmp_path)


async def test_aiordma_serves_a_client_that_talks(
    address: str, tcp_echo: str, tmp_path: Path
) -> None:
    command = (tcp_echo, "talk", "{address}", "{port}")
    await assert_echoed(address, command, LONG, tmp_path)


async def test_aiordma_serves_socat(address: str, tmp_path: Path) -> None:
    """It reads and writes at the same time, and half-closes."""
    command = ("socat", "-t", "30", "-", "TCP4:{address}:{port}")
    await assert_echoed(address, command, LONG, tmp_path)


#: Arguments: host, port, the file of the body, the file for the answer.
HTTP_CLIENT = """
import http.client, pathlib, sys
host, port, source, result = sys.argv[1:]
connection = http.client.HTTPConnection(host, int(port))
connection.request("POST", "/echo", body=pathlib.Path(source).read_bytes())
pathlib.Path(result).write_bytes(connection.getresponse().read())
connection.close()
"""


async def test_aiordma_serves_http(address: str, tmp_path: Path) -> None:
    """A request with a body, answered by the same body; curl connects without blocking.

    The library of rdma-core 65 is no place for curl: there Python stands in, of which an earlier
    one does not take the sockets.
    """
    source, result = tmp_path / "source", tmp_path / "result"
    source.write_bytes(LONG)

    async def http(reader: StreamReader, writer: StreamWriter) -> bytes:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").split("\r\n")
        assert head[0] == "POST /echo HTTP/1.1"
        assert f"Content-Length: {len(LONG)}" in head
        body = await reader.readexactly(len(LONG))
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        writer.write(body)
        await writer.drain()
        assert await reader.read() == b""
        return body

    async with serving_one(address, http) as served:
        command: tuple[str, ...] = (
            "curl", "--noproxy", "*", "-sS", "-H", "Expect:", "-o", str(result),
            "--data-binary", f"@{source}", f"http://{address}:{served.port}/echo",
        )  # fmt: skip
        if IS_LATER:
            where = (address, str(served.port), str(source), str(result))
            command = (sys.executable, "-c", HTTP_CLIENT, *where)
        async with running(*command, LD_PRELOAD=LIBRARY) as client:
            assert_bytes(await served.ended, LONG)  # type: ignore[arg-type]
            await client.finish()
    assert_bytes(result.read_bytes(), LONG)


# The program serves


async def test_a_server_echoes(address: str, port: int, tcp_echo: str) -> None:
    """It reads and writes in turns: it must find its credits and its space while it writes."""
    async with dialed(
        lambda at: (tcp_echo, "server", address, str(at)), address, port, LD_PRELOAD=LIBRARY
    ) as server:
        reader, writer = server.reader, server.writer
        for start in range(0, len(LONG), 64_000):
            piece = LONG[start : start + 64_000]
            writer.write(piece)
            assert_bytes(await reader.readexactly(len(piece)), piece)
        await half_close(server, len(LONG))


async def test_a_server_after_our_half_close(address: str, port: int, tcp_echo: str) -> None:
    """All of it is written, and the end, before the first byte is read."""
    async with dialed(
        lambda at: (tcp_echo, "server", address, str(at)), address, port, LD_PRELOAD=LIBRARY
    ) as server:
        reader, writer = server.reader, server.writer
        writer.write(SHORT)
        writer.write_eof()
        assert_bytes(await reader.readexactly(len(SHORT)), SHORT)
        assert await reader.read() == b""
        await server.program.finish()
    assert server.program.lines[-1] == f"end of stream after {len(SHORT)} bytes"


async def half_close(server: Dialed, total: int) -> None:
    """Our direction ends, then theirs."""
    server.writer.write_eof()
    assert await server.reader.read() == b""
    await server.program.finish()
    assert server.program.lines[-1] == f"end of stream after {total} bytes"


async def test_sockets_that_stay_tcp() -> None:
    """An earlier library takes a plain socket(), but not Python's, which asks for SOCK_CLOEXEC."""
    code = """
import ctypes, os, socket
def where(fd): return os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
print(where(ctypes.CDLL(None).socket(socket.AF_INET, socket.SOCK_STREAM, 0)))
print(where(socket.socket(socket.AF_INET, socket.SOCK_STREAM).detach()))
"""
    async with running(sys.executable, "-c", code, LD_PRELOAD=LIBRARY) as python:
        # An rsocket keeps the place of its number by a descriptor of its own.
        assert await python.finish() == ["/dev/null", "/dev/null" if IS_LATER else "socket"]
