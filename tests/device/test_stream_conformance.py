"""RdmaTransport keeps asyncio's whole transport contract, with no deviation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

import aiordma
from aiordma.testing.stream_conformance import StreamConformance

Factory = Callable[[], asyncio.BaseProtocol]


@pytest.mark.slow
class TestRdmaTransport(StreamConformance):
    """Every check of the kit."""

    @asynccontextmanager
    async def connection(
        self, server_factory: Factory, client_factory: Factory
    ) -> AsyncIterator[None]:
        address = os.environ["AIORDMA_SOFTROCE_ADDR"]
        async with await aiordma.create_server(server_factory, address, 0) as server:
            await aiordma.create_connection(client_factory, address, server.port)
            yield
