"""Datagram endpoints when something goes wrong: no room, nobody there, errors, cancellation."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from typing import Any

import pytest

import aiordma
from aiordma import DatagramConfig, create_datagram_endpoint
from aiordma.datagram.transport import RdmaDatagramTransport
from tests.device.datagrams import Echo, Recorder, endpoint, network_device, run, where
from tests.device.oracle import reported
from tests.device.stepping import every_step, run_canceled
from tests.inside.datagram import known_services

pytestmark = pytest.mark.device


async def test_a_receiver_that_is_overwhelmed(address: str) -> None:
    """What finds no room is lost; the rest is sound, and nothing breaks."""
    small = DatagramConfig(recv_depth=4)
    async with (
        endpoint(Recorder, (address, 0), config=small) as server,
        endpoint(Recorder, remote_addr=where(server)) as client,
    ):
        rng = random.Random(12)
        sent = [n.to_bytes(4, "big") + rng.randbytes(200) for n in range(3000)]
        for data in sent:
            client.transport.sendto(data)  # without a pause: the receiver has no turn
        # A marker ends it, repeated because it, too, may find no room.
        async with asyncio.timeout(20):
            while b"marker" not in server.data:
                client.transport.sendto(b"marker")
                await asyncio.sleep(0)
        arrived = [data for data in server.data if data != b"marker"]
        assert 0 < len(arrived) < len(sent)
        numbers = [int.from_bytes(data[:4], "big") for data in arrived]
        assert numbers == sorted(set(numbers)), "each at most once, and in order"
        assert all(data == sent[n] for n, data in zip(numbers, arrived, strict=True))
        assert not server.errors + client.errors
        # And the way back is as good as before.
        server.transport.sendto(b"answer", server.got[0][1])
        await client.until(lambda: client.data == [b"answer"])


async def test_a_port_on_which_nobody_listens(address: str) -> None:
    with pytest.raises(aiordma.ConnectionRejectedError, match="no such service"):
        await create_datagram_endpoint(Recorder, remote_addr=(address, 1))
    async with endpoint(Recorder, (address, 0)) as server, endpoint(Recorder, (address, 0)) as one:
        one.transport.sendto(b"a", (address, 1))
        one.transport.sendto(b"b", where(server))
        one.transport.sendto(b"c", (address, 1))
        await one.until(lambda: bool(one.errors))
        await server.until(lambda: bool(server.got))
        assert [type(exc) for exc in one.errors] == [aiordma.ConnectionRejectedError]
        assert one.transport.get_write_buffer_size() == 0
        assert server.data == [b"b"]


async def test_a_service_that_is_restarted_is_found_again(address: str) -> None:
    config = DatagramConfig(refresh_s=0.05)
    async with endpoint(Echo, (address, 0)) as first:
        place = where(first)
        client_transport, client = await create_datagram_endpoint(
            Recorder, remote_addr=place, config=config
        )
        client_transport.sendto(b"old")
        await client.until(lambda: client.data == [b"old"])
    async with endpoint(Echo, place):
        async with asyncio.timeout(20):
            while b"new" not in client.data:
                client_transport.sendto(b"new")
                await asyncio.sleep(0.02)
        assert client.got[0][1][:2] == client.got[-1][1][:2] == place
        assert client.got[0][1].qpn != client.got[-1][1].qpn
        assert known_services(client_transport) == 1  # not the old one
    client_transport.close()
    await client_transport.wait_closed()
    assert client.calls.count("lost") == 1


async def test_a_protocol_that_raises(address: str) -> None:
    class Clumsy(Recorder):
        def datagram_received(self, data: bytes, addr: Any) -> None:
            super().datagram_received(data, addr)
            if data == b"bad":
                raise ZeroDivisionError

    with reported() as reports:
        async with (
            endpoint(Clumsy, (address, 0)) as server,
            endpoint(Recorder, remote_addr=where(server)) as client,
        ):
            for data in (b"bad", b"good", b"bad", b"good"):
                client.transport.sendto(data)
            await server.until(lambda: len(server.got) >= 4)
    assert [type(report["exception"]) for report in reports] == [ZeroDivisionError] * 2
    assert all(report["protocol"] is server for report in reports)


async def test_canceled_at_every_await(address: str, late: bool) -> None:
    made: list[RdmaDatagramTransport] = []

    async def make() -> None:
        transport, _ = await create_datagram_endpoint(
            Recorder, (address, 0), where(server), group="239.80.0.1"
        )
        made.append(transport)

    async with endpoint(Echo, (address, 0)) as server:
        for steps in every_step(late=late):
            await run_canceled(make(), steps)
        assert steps.at > 6
        await made[0].join_group("239.80.0.2")
        made[0].abort()
        await made[0].wait_closed()


@pytest.mark.kernel
async def test_a_network_device_that_goes_down_and_up(address: str) -> None:
    """The adapter gives up the queue pair; the endpoint does not."""
    if os.environ.get("AIORDMA_SOFTROCE_ENGINE") == "host":
        pytest.skip("it would take a network device of this machine down")
    card = network_device()
    shown = await run("ip", "-o", "-6", "addr", "show", "dev", card, "scope", "global")
    of_ipv6 = [line.split()[3] for line in shown.splitlines()]  # the kernel forgets them
    async with (
        endpoint(Echo, (address, 0), group="239.80.0.9") as server,
        endpoint(Recorder, remote_addr=where(server)) as client,
    ):
        client.transport.sendto(b"up")
        await client.until(lambda: client.data == [b"up"])
        await run("ip", "link", "set", card, "down")
        try:
            for _ in range(3):
                client.transport.sendto(b"down")
            await client.until(lambda: bool(client.errors))
        finally:
            await run("ip", "link", "set", card, "up")
            for ip in of_ipv6:
                await run("ip", "addr", "replace", ip, "dev", card, "nodad")
        errors = [exc for exc in client.errors if isinstance(exc, OSError)]
        assert {exc.errno for exc in errors} == {errno.ENETDOWN}
        assert isinstance(errors[0].__cause__, aiordma.CompletionError)
        async with asyncio.timeout(20):  # the port takes a moment to be active again
            while client.data[-1] != b"up again":
                client.transport.sendto(b"up again")
                await asyncio.sleep(0.05)
        assert b"down" not in server.data
        # Groups and destinations are what they were.
        async with endpoint(Recorder, (address, 0)) as other:
            other.transport.sendto(b"to the group", ("239.80.0.9", 1))
            await server.until(lambda: b"to the group" in server.data)
        assert client.calls.count("lost") == 0
