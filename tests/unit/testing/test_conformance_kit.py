"""The conformance kit accepts the transports of asyncio and of uvloop."""

from __future__ import annotations

import asyncio
import inspect
from asyncio import selector_events
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from aiordma.testing.stream_conformance import StreamConformance

Factory = Callable[[], asyncio.BaseProtocol]


class Tcp(StreamConformance):
    """The loop's own TCP transports."""

    @asynccontextmanager
    async def connection(
        self, server_factory: Factory, client_factory: Factory
    ) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(server_factory, "127.0.0.1", 0)
        try:
            await loop.create_connection(client_factory, *server.sockets[0].getsockname())
            yield
        finally:
            server.close()


_SOURCE = inspect.getsource(selector_events)
_WRITELINES = inspect.getsource(vars(selector_events)["_SelectorSocketTransport"].writelines)
#: In what asyncio's own transport differs from one release to another: by a line of its source.
_OF_A_RELEASE = {
    # Early releases of 3.11 begin to read although they were told not to.
    "start pauses in name": "if not self.is_reading()" not in _SOURCE,
    # 3.12 sends what is left from the caller's own memory.
    "buffers are kept": "data = memoryview(data)[n:]" in _SOURCE,
    # So does its writelines(), which did not ask at first whether there is a connection.
    "dead writelines raise": (
        "self._write_ready()" in _WRITELINES and "_conn_lost" not in _WRITELINES
    ),
}


class AsyncioTcp(Tcp):
    deviations = frozenset({"gaps are fatal", *(n for n, here in _OF_A_RELEASE.items() if here)})


class UvloopTcp(Tcp):
    deviations = frozenset(
        {
            "foreign class",
            "failed start is deaf",
            "nothing of any type",
            "buffers are kept",
            "start cannot pause",
            "end is not reading",
            "abort keeps size",
            "dead writes raise",
            "short reports",
            "vague get_buffer",
        }
    )


@pytest.mark.parametrize("name", StreamConformance.names())
def test_asyncio(name: str) -> None:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(getattr(AsyncioTcp(), name)())


@pytest.mark.parametrize("name", StreamConformance.names())
def test_uvloop(name: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(getattr(UvloopTcp(), name)())
