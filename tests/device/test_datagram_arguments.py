"""Arguments of a datagram endpoint: a table of calls and what they refuse; it goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiordma
from aiordma import ConnectionConfig, DatagramConfig
from aiordma.datagram.port import SEND_DEPTH
from tests.device.bad_arguments import (
    LIMIT_S,
    NO_BUFFER,
    NO_DEADLINE,
    Bad,
    no_mistakes,
)  # fmt: skip

pytestmark = pytest.mark.device

CONFIG = DatagramConfig()
GROUP = "239.1.1.1"


class Inbox(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.received: asyncio.Queue[bytes] = asyncio.Queue()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.received.put_nowait(data)


async def test_g05_datagrams(address: str) -> None:
    async with asyncio.timeout(LIMIT_S * 3):
        server, inbox = await aiordma.create_datagram_endpoint(Inbox, (address, 0))
        where = server.get_extra_info("sockname")
        client, _ = await aiordma.create_datagram_endpoint(Inbox, (address, 0), config=CONFIG)

        async def works() -> None:
            for number in range(SEND_DEPTH + 4):
                client.sendto(b"%d" % number, where)
                assert await inbox.received.get() == b"%d" % number

        def make(**options: Any) -> Any:
            return aiordma.create_datagram_endpoint(
                Inbox, **{"local_addr": (address, 0), **options}
            )

        def send_to(x: Any) -> Any:
            return client.sendto(b"x", x)

        table: list[Bad] = [
            ("sendto", lambda x: client.sendto(x, where), [*NO_BUFFER, 5, True, bytes(1 << 16)]),
            ("sendto(addr)", send_to, [None, 5, "x", (1, 2), ("a", "b"), (address,), (address, 1.5),
                                       (address, -1), (address, 65536), (address, 0), ("name", 1)]),
            ("join_group", client.join_group, [5, None, "x", address]),
            ("join_group(timeout)", lambda x: client.join_group(GROUP, timeout=x), NO_DEADLINE),
            ("leave_group", client.leave_group, [5, None, "x", address]),
            ("set_write_buffer_limits", client.set_write_buffer_limits, ["x", object(), -1]),
            ("create(local_addr)", lambda x: make(local_addr=x), [5, "x", (address,), (1, 2)]),
            ("create(config)", lambda x: make(config=x), [5, "x", ConnectionConfig()]),
        ]  # fmt: skip
        with no_mistakes() as mistakes:
            await works()
            await mistakes.of_waits(table, lambda _: works())
        for transport in (client, server):
            transport.close()
            await transport.wait_closed()
