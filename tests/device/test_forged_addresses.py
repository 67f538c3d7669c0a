"""Clients that name an address in their request, and have another one."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest

import aiordma
from aiordma import ConnectRequest
from aiordma.endpoint.wire import Hello
from aiordma.rsocket import wire as rsocket
from tests.device.forging import forged_request
from tests.device.oracle import until
from tests.inside.link import acceptor_of

pytestmark = [pytest.mark.device, pytest.mark.two_hosts]

NOBODY = "10.80.0.77"
HELLO = Hello(8, 4, 1024, 1024).pack(56)
HELLO_OF_STREAMS = rsocket.Hello(8, 1 << 20, 1, 16, 1 << 21, 2, 4096).pack()


@pytest.mark.parametrize("host", [None, "10.80.0.1"])
async def test_a_client_with_the_address_of_another_is_refused(
    address: str, host: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither networks nor `authorize` see an address where nobody gets the answer."""
    other = os.environ["AIORDMA_SOFTROCE_ADDR2"]
    asked: list[ConnectRequest] = []

    def authorize(request: ConnectRequest) -> bool:
        asked.append(request)
        return False

    async with (
        asyncio.timeout(60),
        aiordma.listen(host, 0, allow=[NOBODY, other], authorize=authorize) as listener,
    ):
        with caplog.at_level(logging.WARNING, "aiordma"):
            forged_request(other, address, listener.port, NOBODY, HELLO)
            await until(lambda: listener.denied == 1, 30)
        assert not asked
        assert f"'{other}', 40000): it names {NOBODY} as its address" in caplog.text
        forged_request(other, address, listener.port, other, HELLO)
        await until(lambda: listener.denied == 2, 30)
        assert [each.peername for each in asked] == [(other, 40_000)]
        await until(lambda: not acceptor_of(listener).handshakes)


async def test_a_server_of_streams_refuses_it_too(address: str) -> None:
    other = os.environ["AIORDMA_SOFTROCE_ADDR2"]
    server = await aiordma.start_server(lambda reader, writer: None, address, 0)
    async with asyncio.timeout(60), server:
        port = server.sockets[0].getsockname()[1]
        forged_request(other, address, port, NOBODY, HELLO_OF_STREAMS)
        await until(lambda: acceptor_of(server).denied == 1, 30)
