"""Echo over RDMA, by asyncio's streams or by a protocol.

Usage: stream_echo.py (server | protocol-server | client) [ADDRESS] [PORT]
"""

import asyncio
import contextlib
import sys
from typing import Any

import aiordma


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what one client sends, until it ends."""
    while data := await reader.read(64 * 1024):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


class Echo(asyncio.Protocol):
    """The same as a protocol."""

    def connection_made(self, transport: Any) -> None:
        """Keep the transport, which has asyncio's methods."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Send it back."""
        self.transport.write(data)


async def serve(role: str, host: str, port: int) -> None:
    """Serve until Ctrl-C."""
    if role == "server":
        server = await aiordma.start_server(echo, host, port)
    else:
        server = await aiordma.create_server(Echo, host, port)
    print("listening on", *server.sockname, flush=True)
    async with server:
        await server.serve_forever()


async def ask(host: str, port: int) -> None:
    """Say something, and hear it again."""
    reader, writer = await aiordma.open_connection(host, port)
    writer.write(b"hello\n")
    print((await reader.readline()).decode().strip())
    writer.write_eof()
    assert await reader.read() == b""
    print("over", writer.get_extra_info("device"))
    writer.close()
    await writer.wait_closed()


def main(role: str = "", host: str = "10.80.0.1", port: str = "7000") -> None:
    """Run a server or the client."""
    if role not in ("server", "protocol-server", "client"):
        print(
            "usage: stream_echo.py (server | protocol-server | client) [ADDRESS] [PORT]",
            file=sys.stderr,
        )
        sys.exit(2)
    if role == "client":
        asyncio.run(ask(host, int(port)))
        return
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how a server ends
        asyncio.run(serve(role, host, int(port)))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
