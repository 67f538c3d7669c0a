"""This side of a stream: one connection that is served, or one that is made."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiordma
from aiordma import ConnectionFailedError
from tests.interop.program import LIMIT_S, Program, running, until_listening

Talk = Callable[[StreamReader, StreamWriter], Awaitable[object]]


#: How far from one another servers listen of which one is run after the other.
ANOTHER = 4000


class Served:
    """A server for one connection.

    Attributes:
        port: Where it listens.
        ended: The result of the conversation, or its failure.
    """

    def __init__(self, talk: Talk) -> None:
        self.port = 0
        self.ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._talk = talk

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """What the server calls with its connection."""
        try:
            result = await self._talk(reader, writer)
            writer.close()
            await writer.wait_closed()
        except Exception as exc:
            writer.transport.abort()
            self.ended.set_exception(exc)
        else:
            self.ended.set_result(result)


@asynccontextmanager
async def serving_one(
    address: str, talk: Talk, config: aiordma.StreamConfig | None = None
) -> AsyncIterator[Served]:
    """Serve the first connection with `talk`, and close it.  The block awaits `ended`."""
    served = Served(talk)
    server = await aiordma.start_server(served.serve, address, 0, config=config)
    async with server:
        served.port = server.port
        yield served
        assert served.ended.done(), "nobody has asked for the outcome"
    await server.wait_closed()


@dataclass
class Dialed:
    """A connection to a program that serves it."""

    program: Program
    reader: StreamReader
    writer: StreamWriter


@asynccontextmanager
async def dialed(
    command: Callable[[int], tuple[str, ...]],
    address: str,
    port: int,
    config: aiordma.StreamConfig | None = None,
    **env: str,
) -> AsyncIterator[Dialed]:
    """Run a server and connect to it; the block closes the connection.

    Software iWARP takes the first word of a server for a bad answer if it comes before the kernel
    has looked at the answer itself, which C programs do not wait for.  Then another one is run.

    Args:
        command: The program for a port.  It says something when it listens.
        address: Of the device.
        port: Where it is to listen.
        config: Settings of the connection.
        env: Additions to its environment.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def attempt(at: int) -> Dialed:
            program = await stack.enter_async_context(running(*command(at), limit_s=LIMIT_S, **env))
            await program.line("")
            streams = await until_listening(
                program, lambda: aiordma.open_connection(address, at, config=config)
            )
            return Dialed(program, *streams)

        found: Dialed | None = None
        for last in (False, False, True):
            try:
                found = await attempt(port)
                break
            except ConnectionFailedError as exc:
                if last or exc.errno != errno.EINVAL:
                    raise
            port += ANOTHER
        assert found is not None
        try:
            yield found
        finally:
            found.writer.close()
