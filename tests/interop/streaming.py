"""This side of a stream: one connection that is served, or one that is made."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

import aiordma
from aiordma import ConnectionFailedError
from tests.interop.program import (
    LIMIT_S,
    Program,
    attempts,
    running,
    spoke_too_soon,
    until_listening,
)

Talk = Callable[[StreamReader, StreamWriter], Awaitable[object]]


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
    *,
    is_ready: Callable[[Dialed], bool] = lambda _: True,
    **env: str,
) -> AsyncIterator[Dialed]:
    """Run a server and connect to it; the block closes the connection.

    Some come too early for the programs: then another one is run (`spoke_too_soon`, `is_ready`).

    Args:
        command: The program for a port.  It says something when it listens.
        address: Of the device.
        port: Where it is to listen.
        config: Settings of the connection.
        is_ready: Whether the program had made all its preparations before it took the connection.
        env: Additions to its environment.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def attempt(at: int) -> Dialed:
            program = await stack.enter_async_context(running(*command(at), limit_s=LIMIT_S, **env))
            await program.line("")
            streams = await until_listening(
                program, at, lambda: aiordma.open_connection(address, at, config=config)
            )
            dialed = Dialed(program, *streams)
            stack.callback(dialed.writer.close)
            return dialed

        found: Dialed | None = None
        for at in attempts(port):
            try:
                found = await attempt(at)
            except ConnectionFailedError as exc:
                if not spoke_too_soon(exc):
                    raise
            else:
                if is_ready(found):
                    break
        else:
            pytest.fail("the program was never ready")
        assert found is not None
        yield found
