"""Datagrams over a wire: between two devices, with losses, and to hosts that are not there."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import time

import pytest

import aiordma
from aiordma import DatagramAddress, DatagramConfig, create_datagram_endpoint
from aiordma.datagram import destinations
from aiordma.datagram.neighbors import look
from tests.device.datagrams import Echo, Recorder, endpoint
from tests.device.forging import forged_datagrams
from tests.device.netem import faults

pytestmark = [pytest.mark.device, pytest.mark.two_hosts]

GROUP = "239.80.2.1"
PATIENT = DatagramConfig(resolve_timeout_s=60)


@pytest.fixture
def other() -> str:
    """Address of the second device."""
    return os.environ["AIORDMA_SOFTROCE_ADDR2"]


async def test_a_group_with_members_on_both_ends(address: str, other: str) -> None:
    members = []
    for host in (address, other, other):
        _, member = await create_datagram_endpoint(Recorder, (host, 0), group=GROUP)
        members.append(member)
    for n, sender in enumerate(members):
        for i in range(20):
            sender.transport.sendto(bytes([n, i]), (GROUP, 1))
        for member in members:
            await member.until(lambda m=member, n=n: len(m.got) >= 20 * (n + 1))
    expected = [
        (bytes([n, i]), host) for n, host in enumerate((address, other, other)) for i in range(20)
    ]
    for member in members:
        assert [(data, addr.host) for data, addr in member.got] == expected
        member.transport.close()
    for member in members:
        await member.transport.wait_closed()


async def test_a_wire_that_loses_and_doubles(address: str, other: str, wire: None) -> None:
    """Some are lost and some come twice; none is damaged, and every answer finds its way."""
    _, server = await create_datagram_endpoint(Echo, (address, 0), config=PATIENT)
    place = server.transport.get_extra_info("sockname")
    faults("loss", "20%", "duplicate", "10%")
    _, client = await create_datagram_endpoint(Recorder, (other, 0), place, config=PATIENT)
    mtu = client.transport.get_extra_info("mtu")
    rng = random.Random(7)
    sent = [n.to_bytes(4, "big") + rng.randbytes(rng.randrange(mtu - 4)) for n in range(500)]
    for data in sent:
        client.transport.sendto(data)
        await asyncio.sleep(0.001)
    await asyncio.sleep(1)  # the wire is empty
    arrived, came_back = len(set(server.data)), len(set(client.data))
    print(f"sent 500, arrived {len(server.data)} ({arrived} different), back {came_back}")
    assert 300 < arrived < 480
    assert 150 < came_back < arrived
    assert set(server.data) <= set(sent)
    assert set(client.data) <= set(server.data)
    assert len(server.data) > arrived, "netem has doubled none: the test shows nothing"
    assert not server.errors + client.errors
    for end in (client, server):
        end.transport.close()
        await end.transport.wait_closed()


async def test_a_host_that_is_not_there(address: str) -> None:
    """The kernel asks the network for a neighbor, and blocks; the loop does not."""
    nobody = "10.80.0.99"
    _, one = await create_datagram_endpoint(Recorder, (address, 0))
    began = time.monotonic()
    gaps = []

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - before)

    ticking = asyncio.create_task(tick())
    one.transport.sendto(b"x", DatagramAddress(nobody, 0, 17))
    one.transport.sendto(b"y", (nobody, 7000))
    await one.until(lambda: len(one.errors) >= 2, 60)
    ticking.cancel()
    print([repr(exc) for exc in one.errors], f"{time.monotonic() - began:.1f} s")
    assert all(isinstance(exc, OSError) for exc in one.errors)
    assert max(gaps) < 2, "it waits for more than three seconds"
    assert one.transport.get_write_buffer_size() == 0
    with pytest.raises((aiordma.ConnectionFailedError, aiordma.ConnectTimeoutError)):
        await create_datagram_endpoint(Recorder, remote_addr=(nobody, 7000))
    one.transport.close()
    await one.transport.wait_closed()


async def test_g09_a_source_that_the_kernel_has_forgotten(address: str, other: str) -> None:
    """Its next hop is asked for without a thread that waits."""
    _, server = await create_datagram_endpoint(Echo, (address, 0))
    place = server.transport.get_extra_info("sockname")
    _, peer = await create_datagram_endpoint(Recorder, (other, 0), place)
    subprocess.run(["ip", "neigh", "flush", "dev", "veth0"], check=True)  # noqa: ASYNC221
    hop = look(other, address)
    assert hop is not None
    assert not hop.known
    peer.transport.sendto(b"forgotten")
    await peer.until(lambda: peer.data == [b"forgotten"])
    now = look(other, address)
    assert now is not None
    assert now.known
    assert not server.errors
    for end in (peer, server):
        end.transport.close()
        await end.transport.wait_closed()


async def test_g09_a_source_that_does_not_answer(address: str) -> None:
    nobody = "10.80.0.98"
    _, one = await create_datagram_endpoint(Recorder, (address, 0))
    one.transport.sendto(b"x", DatagramAddress(nobody, 0, 17))
    await one.until(lambda: bool(one.errors))
    assert f"{nobody} queue pair 17: the neighbor {nobody} does not answer" in str(one.errors[0])
    one.transport.close()
    await one.transport.wait_closed()


async def test_g09_forged_datagrams_do_not_stop_answers(
    address: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 5
    monkeypatch.setattr(destinations, "MOST_UNRESOLVED", 32)
    _, server = await create_datagram_endpoint(Echo, (address, 0))
    place = server.transport.get_extra_info("sockname")
    _, service = await create_datagram_endpoint(Recorder, (other, 0))
    async with forged_datagrams(address, server.transport.get_extra_info("qpn"), 100):
        await server.until(lambda: bool(server.errors))  # the line of sources is full
        assert b"evil" in server.data
        for _ in range(3):
            async with endpoint(Recorder, (other, 0), place) as peer:
                peer.transport.sendto(b"genuine")
                await peer.until(lambda peer=peer: peer.data == [b"genuine"], limit_s)
        server.transport.sendto(b"asked", service.transport.get_extra_info("sockname"))
        await service.until(lambda: service.data == [b"asked"], limit_s)
    errors = [exc for exc in server.errors if isinstance(exc, OSError)]
    assert len(errors) == len(server.errors)
    assert {exc.errno for exc in errors} <= {errno.ENOBUFS, errno.EHOSTUNREACH}
    for end in (service, server):
        end.transport.abort()
        await end.transport.wait_closed()
