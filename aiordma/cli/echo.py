"""`aiordma echo`: sends every message back, for `aiordma ping` and `aiordma doctor PEER`.

Clients are bounded in number, as is the memory that is exposed to them, in all and for each source.
A client that does not read its messages is given up.  When a client has gone, a line in the output
says so; see lines.py for lines that are not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from aiordma.cli.echo_orders import GIVE, MOST, STREAM_ORDER, TAKE, parse_order, pattern
from aiordma.cli.lines import LineWriter, event_line
from aiordma.cli.output import print_hint
from aiordma.cli.version import aiordma_version
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.errors import RdmaError
from aiordma.link.limits import ListenerLimits
from aiordma.link.source import source_of
from aiordma.service.server import serve
from aiordma.streams.server import start_server

__all__ = ["run"]

_GRACE_S = 2.0
_SILENT_S = 60.0  # of a client of streams, whose every step is bounded by it
#: Seconds in which a client of messages may read nothing that is sent back.
STALL_S = 60.0
_MOST_EXPOSED = 8  # clients at a time
_MOST_EXPOSED_PER_SOURCE = 6


def run(host: str, port: int, *, as_json: bool, most_clients: int) -> int:
    """Serve until SIGINT or SIGTERM.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 lets the kernel choose.
        as_json: Print each line as a JSON object.
        most_clients: Clients that are served at a time; more are refused.

    Returns:
        0; 1 if the port is not available.
    """

    def lost(count: int) -> str:
        words = f"{count} lines: nothing has read them"
        return event_line("lost", words, as_json=as_json, lines=count)

    lines = LineWriter(sys.stdout, lost)

    def say(event: str, words: str, **facts: object) -> None:
        lines.put(event_line(event, words, as_json=as_json, **facts))

    try:
        asyncio.run(Echo(say, most_clients).serve(host, port))
    except (OSError, RdmaError) as exc:
        print_hint(f"aiordma echo: cannot listen on {host} port {port}: {exc}")
        return 1
    finally:
        lines.close()
    return 0


class Echo:
    """The server.

    Args:
        say: Called with the event, the words and the facts of a line.
        most_clients: Clients at a time.
    """

    def __init__(self, say: Callable[..., None], most_clients: int) -> None:
        self._say = say
        self._most_clients = most_clients
        self._exposed: Counter[str] = Counter()  # clients, by source
        self._stream_port = 0

    async def serve(self, host: str, port: int) -> None:
        """Listen until a signal."""
        limits = ListenerLimits(
            max_connections=self._most_clients,
            max_connections_per_source=self._most_clients,
            max_half_open=min(64, self._most_clients),
        )
        streams = await start_server(self._stream, host, 0, limits=limits)
        async with streams:
            self._stream_port = streams.port
            config = ConnectionConfig(stall_timeout_s=STALL_S)
            serving = serve(
                self._echo, host, port, config=config, limits=limits, grace_s=_GRACE_S, signals=True
            )
            async with serving as server:
                name, number = server.sockname[:2]
                self._say("listening", f"on {name} {number}", host=name, port=number)
                await server.serve_forever()
            streams.close()
            streams.abort_clients()

    # Messages

    async def _echo(self, connection: Connection) -> None:
        peer = connection.get_extra_info("peername") or ("unknown", 0)
        count = size = 0
        try:
            async with contextlib.AsyncExitStack() as leases:
                orders = Orders(connection, self, leases)
                async for message in connection:
                    size += len(message)
                    count += 1
                    found = None if orders.takes else parse_order(message)
                    if orders.takes or found:
                        await orders.obey(found, message)
                    else:
                        await connection.send(message)
        except TimeoutError:
            connection.abort()  # it reads nothing
        finally:
            words = f"{peer[0]} {peer[1]}, {count} messages, {size} bytes"
            self._say("client", words, host=peer[0], port=peer[1], messages=count, bytes=size)

    def facts(self, connection: Connection) -> dict[str, Any]:
        """The answer to the order `facts`."""
        return {
            "aiordma": aiordma_version(),
            "device": connection.get_extra_info("device"),
            "stream_port": self._stream_port,
        }

    @contextlib.contextmanager
    def exposing(self, address: str | None) -> Iterator[int]:
        """The place of a client to which memory is exposed.

        Args:
            address: The client's address.

        Returns:
            0; or, if there is no place, the number of clients that have all of them.
        """
        source = source_of(address)
        there = self._exposed.total()
        own = self._exposed[source]
        full = own if own >= _MOST_EXPOSED_PER_SOURCE else there if there >= _MOST_EXPOSED else 0
        if full:
            yield full
            return
        self._exposed[source] += 1
        try:
            yield 0
        finally:
            self._exposed -= Counter([source])  # and forgets a source of 0

    # Streams

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._stream_step(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone, in its own way, or is silent
        finally:
            writer.transport.abort()

    async def _stream_step(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        async with asyncio.timeout(_SILENT_S):
            word, size = STREAM_ORDER.unpack(await reader.readexactly(STREAM_ORDER.size))
            if word not in (TAKE, GIVE) or size > MOST:
                return False
            if word == TAKE:
                data = await reader.readexactly(size)
                writer.write(zlib.crc32(data).to_bytes(4))
            else:
                writer.write(pattern()[:size])
            await writer.drain()
            return True


class Orders:
    """The orders of one client.

    Args:
        connection: The connection to it.
        echo: The server.
        leases: Ends with the connection.

    Attributes:
        takes: Whether the next message is not an order, but to be looked at.
    """

    def __init__(
        self, connection: Connection, echo: Echo, leases: contextlib.AsyncExitStack
    ) -> None:
        self._connection = connection
        self._echo = echo
        self._leases = leases
        self._memory: bytearray | None = None
        self.takes: bool = False

    async def obey(self, order: tuple[str, int] | None, message: Any) -> None:
        """Carry out an order, or take the message that an order has announced (None)."""
        if order is None:
            self.takes = False
            await self._answer(size=len(message), crc32=zlib.crc32(message))
            return
        word, size = order
        if word == "facts":
            await self._answer(**self._echo.facts(self._connection))
        elif word == "take":
            self.takes = True
        elif word == "give":
            await self._connection.send(pattern()[:size])
        elif word == "expose":
            await self._expose()
        elif self._memory is None:
            await self._answer(error="no memory is exposed")
        else:
            with memoryview(self._memory) as view:
                crc32 = zlib.crc32(view[:size])
            await self._answer(size=size, crc32=crc32)

    async def _expose(self) -> None:
        if self._memory is not None:
            await self._answer(error="memory is exposed already")
            return
        peer = self._connection.get_extra_info("peername")
        if full := self._leases.enter_context(self._echo.exposing(peer and peer[0])):
            await self._answer(error=f"memory is exposed to {full} clients already")
            return
        memory = bytearray(pattern())
        lease = self._connection.expose(memory, read=True, write=True)
        try:
            region = await self._leases.enter_async_context(lease)
        except (OSError, RdmaError) as exc:
            await self._answer(error=str(exc))
            return
        self._memory = memory
        # The client may be older, and of no other connection: the region ends with this one.
        await self._answer(region=region.to_bytes(version=1).hex())

    async def _answer(self, **facts: Any) -> None:
        await self._connection.send(json.dumps(facts).encode())
