"""Datagrams: an echo service, and a multicast group.  Usage: datagrams.py [ADDRESS]."""

import asyncio
import sys
from typing import Any

import aiordma


class Echo(asyncio.DatagramProtocol):
    """Answers each datagram."""

    def connection_made(self, transport: Any) -> None:
        """Keep the way back."""
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Answer, in capitals."""
        self.transport.sendto(data.upper(), addr)


class Print(asyncio.DatagramProtocol):
    """Puts what arrives into a queue."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Keep a datagram that has arrived."""
        self.arrived.put_nowait(data)

    def error_received(self, exc: Exception) -> None:
        """Report datagrams that could not be sent."""
        print("lost:", exc)


async def main(address: str) -> None:
    """A question and an answer, then a word to a group."""
    server, _ = await aiordma.create_datagram_endpoint(Echo, local_addr=(address, 7007))
    client, printer = await aiordma.create_datagram_endpoint(Print, remote_addr=(address, 7007))
    client.sendto(b"hello")
    print(await printer.arrived.get())

    group = ("239.80.0.1", 0)
    await server.join_group(group)
    speaker, printer = await aiordma.create_datagram_endpoint(Print, local_addr=(address, 0))
    speaker.sendto(b"to everybody in the group", group)
    print(await printer.arrived.get())

    for transport in (server, client, speaker):
        transport.close()
        await transport.wait_closed()


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "10.80.0.1"))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
