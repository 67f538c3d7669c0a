"""`create_datagram_endpoint` and foreign peers: asyncio's contract with udaddy and mckey.

The endpoint sends no immediates.  So it can serve udaddy, and send to mckey, but not call a server
of udaddy, which looks there for the way back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiordma import NotSupportedError, create_datagram_endpoint
from tests.device.datagrams import Recorder
from tests.interop.datagram_programs import (
    ATTEMPTS,
    GROUP,
    IDLE,
    PORT,
    SERVICES,
    assert_well,
    mckey,
    udaddy,
)
from tests.interop.mailbox import FRESH, MESSAGES, SIZE, TUNABLES
from tests.interop.program import assert_bytes, running


@asynccontextmanager
async def endpoint(
    kind: type[Recorder], local: tuple[str, int], **options: Any
) -> AsyncIterator[Recorder]:
    """The protocol of an endpoint, which is gone at the end."""
    transport, protocol = await create_datagram_endpoint(kind, local, **options)
    try:
        yield protocol
    finally:
        transport.abort()
        await transport.wait_closed()


async def assert_not_supported(address: str) -> None:
    with pytest.raises(NotSupportedError, match="iWARP"):
        async with endpoint(Recorder, (address, 0)):
            pass


def assert_fresh(protocol: Recorder, count: int) -> None:
    assert len(protocol.data) == count
    for data in protocol.data:
        assert_bytes(data, FRESH * SIZE)
    assert not protocol.errors


class LateEcho(Recorder):
    """Answers when all of udaddy's datagrams have come.

    It sends from the memory that it receives into.  Soft-RoCE takes the bytes of a datagram when it
    makes the packet: an answer to the first would stand in one that has not left yet.
    """

    def datagram_received(self, data: bytes, addr: Any) -> None:
        super().datagram_received(data, addr)
        if len(self.got) == SERVICES * MESSAGES:
            for received, sender in self.got:
                self.transport.sendto(received, sender)


async def test_an_endpoint_serves_udaddy(address: str, is_siw: bool) -> None:
    if is_siw:
        await assert_not_supported(address)
        return
    async with (
        endpoint(LateEcho, (address, PORT)) as server,
        running(*udaddy("-s", address), GLIBC_TUNABLES=TUNABLES) as client,
    ):
        await client.finish()
        assert_fresh(server, SERVICES * MESSAGES)
        assert len({addr.qpn for _, addr in server.got}) == SERVICES
    assert_well(client)


async def test_an_endpoint_hears_mckey(address: str, is_siw: bool) -> None:
    if is_siw:
        await assert_not_supported(address)
        return
    for _ in range(ATTEMPTS):
        async with endpoint(Recorder, (address, 0), group=GROUP) as receiver:
            async with running(*IDLE, *mckey(address, "-s"), GLIBC_TUNABLES=TUNABLES) as sender:
                await sender.finish()
            try:
                await receiver.until(lambda: len(receiver.got) >= MESSAGES, seconds=3)
            except TimeoutError:
                continue  # it has destroyed its queue pair before all had left it: see IDLE
            assert_fresh(receiver, MESSAGES)
            return
    pytest.fail(f"in {ATTEMPTS} attempts mckey never sent {MESSAGES} datagrams")


async def test_mckey_hears_an_endpoint(address: str, is_siw: bool) -> None:
    if is_siw:
        await assert_not_supported(address)
        return
    async with (
        endpoint(Recorder, (address, 0)) as sender,
        running(*mckey(address)) as receiver,
    ):
        await receiver.line("mckey: joined dgid: ")
        for number in range(MESSAGES):
            sender.transport.sendto(bytes([number]) * SIZE, (GROUP, 1))
        await receiver.finish()
