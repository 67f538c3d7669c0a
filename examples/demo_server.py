"""The server process of demo.py: takes a file, says whether it arrived whole, then echoes.

It serves one client over RDMA, and then one over TCP, for comparison.  The conversation is the
same; each line here is a message:

    client  {"name": ..., "size": ...}     what will come, in JSON
    client  chunk, chunk, ...              `size` bytes altogether
    client  SHA-256 of the file            32 bytes
    server  {"sha256": ..., "match": ...}  computed over the bytes that arrived
    client  ping, ping, ...                each answered with the same bytes
    client  closes
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import hashlib
import json
import struct
import sys
from collections.abc import AsyncIterator

import aiordma

LENGTH = struct.Struct("!I")


class TcpMessages:
    """Messages over TCP, by the methods of a Connection: the length, then the bytes."""

    #: Limit of the reader, which then takes a message of the demo without a stop.
    LIMIT = 2 << 20

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, host: str, port: int) -> TcpMessages:
        """Connect; `async with` closes."""
        return cls(*await asyncio.open_connection(host, port, limit=cls.LIMIT))

    async def send(self, data: bytes | memoryview | aiordma.Message) -> None:
        """Send a message."""
        self._writer.writelines((LENGTH.pack(len(data)), memoryview(data)))
        await self._writer.drain()

    async def recv(self) -> memoryview:
        """Receive a message; IncompleteReadError, an EOFError, at the end."""
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return memoryview(await self._reader.readexactly(length))

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        while True:
            try:
                message = await self.recv()
            except asyncio.IncompleteReadError as end:
                if end.partial:
                    raise
                return
            yield message

    async def __aenter__(self) -> TcpMessages:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()


Ends = aiordma.Connection | TcpMessages


async def receive_file(conn: Ends) -> None:
    """Take a file and answer with the verdict."""
    metadata = json.loads(bytes(await conn.recv()))
    digest, received = hashlib.sha256(), 0
    while received < metadata["size"]:
        # The message lies in the memory that the adapter wrote to; the `with` block gives it back.
        with await conn.recv() as message:
            digest.update(message)
            received += len(message)
    announced = bytes(await conn.recv())
    match = received == metadata["size"] and digest.digest() == announced
    verdict = {"sha256": digest.hexdigest(), "match": match}
    await conn.send(json.dumps(verdict).encode())


async def converse(conn: Ends) -> None:
    """Have the whole conversation with a client."""
    await receive_file(conn)
    async for message in conn:
        await conn.send(message)


async def listen_tcp(
    host: str, clients: asyncio.Queue[TcpMessages]
) -> tuple[asyncio.Server, int] | None:
    """Listen at the same address; None where only the RDMA device has it, as over the fabric."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.put_nowait(TcpMessages(reader, writer))

    try:
        server = await asyncio.start_server(accept, host, 0, limit=TcpMessages.LIMIT)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return None
    return server, server.sockets[0].getsockname()[1]


async def serve(host: str, timeout: float) -> None:
    """Serve one client over RDMA, and one over TCP.

    Args:
        host: Address of the RDMA device.
        timeout: Seconds for all of it.

    Raises:
        OSError: No device has the address, or the connection broke; TimeoutError is one.
    """
    clients: asyncio.Queue[TcpMessages] = asyncio.Queue()
    async with asyncio.timeout(timeout), aiordma.listen(host, 0) as listener:
        tcp = await listen_tcp(host, clients)
        # The parent reads this line: it is the event that says that a client may come.
        ports = {"port": listener.port, "tcp_port": tcp[1] if tcp else None}
        print(json.dumps(ports), flush=True)
        async with await listener.accept() as conn:
            await converse(conn)
        if tcp:
            async with tcp[0], await clients.get() as client:
                await converse(client)


def run(loop: str, host: str, timeout: float) -> None:
    """Run `serve` on asyncio's own loop or on uvloop."""
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(host, timeout))


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description="The server of demo.py, which starts it.")
    parser.add_argument("host", help="address of the RDMA device")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    options = parser.parse_args()
    try:
        run(options.loop, options.host, options.timeout)
    except (OSError, aiordma.RdmaError) as error:
        print(f"demo server: {error or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
