"""Answers to sources that do not exist, as forged datagrams cause them, stop no other answer."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiordma import DatagramAddress
from aiordma.datagram import destinations
from tests.device.datagrams import Echo, Recorder, endpoint, network_device, run, where
from tests.native_ends import beside

pytestmark = pytest.mark.device

PLACES = 16
AT_ONCE = 4 * PLACES
RATE = 100  # a second
LIMIT_S = 10


@asynccontextmanager
async def silent_neighbors() -> AsyncIterator[None]:
    """The kernel asks the network for each address, on a card that brings no answer."""
    card = network_device()
    without = "NOARP" in await run("ip", "-o", "link", "show", "dev", card)
    if without:
        await run("ip", "link", "set", "dev", card, "arp", "on")
    try:
        yield
    finally:
        if without:
            await run("ip", "link", "set", "dev", card, "arp", "off")


@asynccontextmanager
async def flood(server: Recorder) -> AsyncIterator[None]:
    """Answers to ever new sources, as an echo gives to forged datagrams."""
    net = where(server)[0].rpartition(".")[0]

    def answer(number: int) -> None:
        source = DatagramAddress(f"{net}.{100 + number % 150}", 0, 0x1000 + number)
        server.transport.sendto(b"forged", source)

    async def send() -> None:
        number = 0
        while True:
            number += 1
            answer(number)
            if number > AT_ONCE:
                await asyncio.sleep(1 / RATE)

    async with beside(send()):
        yield


@pytest.mark.kernel
async def test_g09_forged_sources_do_not_stop_answers(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destinations, "MOST_UNRESOLVED", PLACES)
    async with (
        silent_neighbors(),
        endpoint(Echo, (address, 0)) as server,
        endpoint(Echo, (address, 0)) as service,
    ):
        async with flood(server):
            # The line of sources that wait is full.
            await server.until(lambda: bool(server.errors), LIMIT_S)
            for _ in range(5):
                async with endpoint(Recorder, remote_addr=where(server)) as peer:
                    peer.transport.sendto(b"genuine")
                    await peer.until(lambda peer=peer: peer.data == [b"genuine"], LIMIT_S)
            server.transport.sendto(b"asked", where(service))
            await server.until(lambda: b"asked" in server.data, LIMIT_S)
        errors = [exc for exc in server.errors if isinstance(exc, OSError)]
        assert len(errors) == len(server.errors)
        assert {exc.errno for exc in errors} <= {errno.ENOBUFS, errno.EHOSTUNREACH}
        assert all("queue pair" in str(exc) for exc in errors)
