"""Multicast groups: who receives what, and who does not any more.

What does not arrive is proved by what arrives later: a datagram to a second group takes the same
way behind the first.
"""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma import create_datagram_endpoint
from aiordma.cm import ConnectionId, EventChannel, EventType, PortSpace
from aiordma.verbs import AddressHandle, AHAttributes
from tests.device.datagrams import Recorder, UDEnd, bound
from tests.device.oracle import collect, reported
from tests.device.shared import OVER_FABRIC
from tests.device.stepping import every_step, run_canceled
from tests.inside.cm import before_leaving_groups

pytestmark = pytest.mark.device

GROUP = "239.80.1.1"
MARKER = "239.80.1.2"


def joined(group: str) -> bool:
    """Whether the kernel has told the network that this machine is a member."""
    number = int.from_bytes(socket.inet_aton(group), "little")
    return f"{number:08X}" in Path("/proc/net/igmp").read_text()


@pytest.fixture
async def three(address: str) -> AsyncIterator[list[Recorder]]:
    """Three members of GROUP and of MARKER."""
    async with AsyncExitStack() as stack:
        members = []
        for _ in range(3):
            transport, member = await create_datagram_endpoint(Recorder, (address, 0), group=GROUP)
            stack.push_async_callback(transport.wait_closed)
            stack.callback(transport.close)
            await transport.join_group(MARKER)
            members.append(member)
        yield members
    assert not joined(GROUP)
    assert not joined(MARKER)
    assert all(member.calls.count("lost") == 1 for member in members)


async def send_marker(sender: Recorder, *receivers: Recorder) -> None:
    """What was sent before it has arrived when it has."""
    sender.transport.sendto(b"marker", (MARKER, 5000))
    for receiver in receivers:
        await receiver.until(lambda r=receiver: b"marker" in r.data)


@pytest.mark.smoke
async def test_each_of_three_members_gets_each_datagram(three: list[Recorder]) -> None:
    rng = random.Random(21)
    mtu = three[0].transport.get_extra_info("mtu")
    sent: list[list[bytes]] = []
    for n, sender in enumerate(three):
        mine = [bytes([n, i]) + rng.randbytes(rng.randrange(mtu - 2)) for i in range(30)]
        for data in mine:
            sender.transport.sendto(data, (GROUP, 5000))
        sent.append(mine)
        total = 30 * (n + 1)
        for member in three:
            await member.until(lambda m=member, t=total: len(m.got) >= t)
    numbers = [member.transport.get_extra_info("qpn") for member in three]
    for member in three:  # the sender among them
        for n, mine in enumerate(sent):
            from_it = [data for data, addr in member.got if addr.qpn == numbers[n]]
            assert from_it == mine
        assert len(member.got) == 90
        assert {addr.host for _, addr in member.got} == {
            member.transport.get_extra_info("sockname")[0]
        }


async def test_a_group_that_was_left_sends_nothing_more(three: list[Recorder]) -> None:
    leaver, stayer, sender = three
    sender.transport.sendto(b"before", (GROUP, 5000))
    for member in three:
        await member.until(lambda m=member: m.data == [b"before"])
    await leaver.transport.leave_group(GROUP)
    for n in range(20):
        sender.transport.sendto(bytes([n]), (GROUP, 5000))
    await send_marker(sender, leaver, stayer)
    assert leaver.data == [b"before", b"marker"]
    assert stayer.data == [b"before", *(bytes([n]) for n in range(20)), b"marker"]
    with pytest.raises(OSError, match="EADDRNOTAVAIL"):
        await leaver.transport.leave_group(GROUP)
    # It can still send to it, and be a member again.
    leaver.transport.sendto(b"from outside", (GROUP, 5000))
    await stayer.until(lambda: stayer.data[-1] == b"from outside")
    assert leaver.data == [b"before", b"marker"]
    await leaver.transport.join_group(GROUP)
    sender.transport.sendto(b"again", (GROUP, 5000))
    await leaver.until(lambda: leaver.data[-1] == b"again")


async def test_what_waits_when_a_group_is_left_is_not_delivered(three: list[Recorder]) -> None:
    leaver, _, sender = three
    sender.transport.sendto(b"first", (GROUP, 5000))  # whose way is known then
    await leaver.until(lambda: leaver.data == [b"first"])
    sender.transport.sendto(b"on its way", (GROUP, 5000))
    await leaver.transport.leave_group(GROUP)
    await send_marker(sender, leaver)
    assert leaver.data == [b"first", b"marker"]


async def test_a_member_that_only_sends_receives_nothing(
    three: list[Recorder], address: str
) -> None:
    transport, sender = await create_datagram_endpoint(Recorder, (address, 0))
    await transport.join_group(MARKER)
    await transport.join_group(GROUP, send_only=True)
    for _ in range(5):
        transport.sendto(b"x", (GROUP, 5000))
    await three[0].until(lambda: three[0].data == [b"x"] * 5)
    await send_marker(sender, sender, *three)
    assert sender.data == [b"marker"]
    assert three[0].data == [b"x"] * 5 + [b"marker"]
    # A full member after all.
    await transport.join_group(GROUP)
    await transport.join_group(GROUP, send_only=True)  # changes nothing
    transport.sendto(b"y", (GROUP, 5000))
    await sender.until(lambda: sender.data[-1] == b"y")
    transport.close()
    await transport.wait_closed()


async def test_a_group_as_the_remote_address(three: list[Recorder], address: str) -> None:
    transport, sender = await create_datagram_endpoint(
        Recorder, (address, 0), remote_addr=(GROUP, 5000)
    )
    assert transport.get_extra_info("peername") == (GROUP, 5000)
    transport.sendto(b"to all")
    for member in three:
        await member.until(lambda m=member: m.data == [b"to all"])
    # An answer finds the sender, which hears whoever writes to it.
    three[1].transport.sendto(b"to one", three[1].got[0][1])
    await sender.until(lambda: sender.data == [b"to one"])
    transport.close()
    await transport.wait_closed()


@pytest.mark.kernel  # /proc/net/igmp
async def test_the_network_is_told(events: EventChannel, address: str) -> None:
    end = UDEnd(bound(events, address))
    assert not joined(GROUP)
    event = await end.cm_id.join_multicast(GROUP)
    assert joined(GROUP)
    assert (event.type, event.qp_num, event.qkey) == (
        EventType.MULTICAST_JOIN, 0xFFFFFF, 0x01234567,
    )  # fmt: skip
    assert event.ah_attr is not None
    assert event.ah_attr.dgid[12:] == socket.inet_aton(GROUP)
    assert end.cm_id.groups == (GROUP,)
    await end.cm_id.leave_multicast((GROUP, 5))
    assert not joined(GROUP)
    assert not end.cm_id.groups
    await end.cm_id.join_multicast(GROUP, send_only=True)
    assert not joined(GROUP)
    end.close()


@pytest.mark.kernel
async def test_an_id_that_resolved_its_group(events: EventChannel, address: str) -> None:
    """As mckey does it: the way to the group tells the device."""
    cm_id = ConnectionId(events, PortSpace.UDP)
    await cm_id.resolve_addr((GROUP, 0), (address, 0), timeout=5)
    end = UDEnd(cm_id)
    event = await cm_id.join_multicast(GROUP)
    assert event.ah_attr is not None
    assert event.ah_attr.dgid[12:] == socket.inet_aton(GROUP)
    assert joined(GROUP)
    end.close()


async def test_the_queue_pair_of_who_left_or_only_sends(events: EventChannel, address: str) -> None:
    """The adapter itself brings nothing: what was sent to the group took no receive."""
    end, member = UDEnd(bound(events, address)), UDEnd(bound(events, address))
    ways = [await member.cm_id.join_multicast(group) for group in (GROUP, MARKER)]
    await end.cm_id.join_multicast(MARKER)
    for send_only in (False, True):
        await end.cm_id.join_multicast(GROUP, send_only=send_only)
        if not send_only:
            await end.cm_id.leave_multicast(GROUP)
        arriving = await end.receiving()
        for way, data in zip(ways, (b"not for us", b"marker"), strict=True):
            at_member = await member.receiving()
            assert way.ah_attr is not None
            with await AddressHandle.create(member.pd, way.ah_attr) as handle:
                await member.qp.send(
                    member.put(data), ah=handle, remote_qpn=way.qp_num, remote_qkey=way.qkey
                )
            assert (await at_member)[0] == data
        assert (await arriving)[0] == b"marker"
    for one in (end, member):
        one.close()


async def test_a_join_waits_for_what_is_being_left(
    events: EventChannel, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then an event of the old membership could be taken for one of the new."""
    may_leave = threading.Event()
    end = UDEnd(bound(events, address))
    await end.cm_id.join_multicast(GROUP)
    before_leaving_groups(monkeypatch, lambda: may_leave.wait(10))
    with pytest.raises(TimeoutError):
        await end.cm_id.leave_multicast(GROUP, timeout=0.02)
    with pytest.raises(aiordma.ConnectTimeoutError, match="was not left"):
        await end.cm_id.join_multicast(MARKER, timeout=0.02)
    joining = asyncio.create_task(end.cm_id.join_multicast(MARKER))
    await asyncio.sleep(0.02)
    assert not joining.done()
    may_leave.set()
    event = await joining
    assert event.ah_attr is not None
    assert event.ah_attr.dgid[12:] == socket.inet_aton(MARKER)
    assert end.cm_id.groups == (MARKER,)
    end.close()


async def test_a_group_whose_leaving_fails_when_nobody_waits_for_it(
    events: EventChannel, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_fail = threading.Event()

    def fail() -> None:
        may_fail.wait(10)
        msg = "the device is gone"
        raise OSError(errno.ENODEV, msg)

    end = UDEnd(bound(events, address))
    await end.cm_id.join_multicast(GROUP)
    before_leaving_groups(monkeypatch, fail)
    with reported() as reports:
        with pytest.raises(TimeoutError):
            await end.cm_id.leave_multicast(GROUP, timeout=0.02)
        with pytest.raises(aiordma.ConnectTimeoutError, match="was not left"):
            await end.cm_id.join_multicast(MARKER, timeout=0.02)
        may_fail.set()
        await end.cm_id.join_multicast(MARKER)
        collect()
    assert not reports
    end.close()


async def test_the_way_back_from_a_group(events: EventChannel, address: str) -> None:
    end = UDEnd(bound(events, address))
    event = await end.cm_id.join_multicast(GROUP)
    assert event.ah_attr is not None
    handle = await AddressHandle.create(end.pd, event.ah_attr)
    receiving = await end.receiving()
    await end.qp.send(end.put(b"x"), ah=handle, remote_qpn=event.qp_num, remote_qkey=event.qkey)
    _, header, wc = await receiving
    assert header.is_multicast
    assert str(header) == f"{address} -> {GROUP}"
    assert end.cm_id.context is not None
    assert AHAttributes.from_wc(end.cm_id.context, wc, header) == AHAttributes.to(
        end.cm_id.context, address
    )
    handle.close()
    end.close()


async def test_bad_calls(events: EventChannel, address: str) -> None:
    end = UDEnd(bound(events, address))
    cm_id = end.cm_id
    for host in (address, "0.0.0.0", "name", "::1"):
        with pytest.raises(ValueError, match=r"multicast|address"):
            await cm_id.join_multicast(host)
    if not OVER_FABRIC:  # the kernel joins no IPv6 group on RoCE v2; adapters do
        with pytest.raises(aiordma.NotSupportedError, match="only IPv4 groups"):
            await cm_id.join_multicast("ff0e::80")
    await cm_id.join_multicast(GROUP)
    with pytest.raises(OSError, match="EADDRINUSE"):
        await cm_id.join_multicast((GROUP, 99), send_only=True)
    with pytest.raises(OSError, match="EADDRNOTAVAIL"):
        await cm_id.leave_multicast(MARKER)
    with pytest.raises(ValueError, match="16 bytes"):
        end.qp.attach_mcast(b"short")
    with pytest.raises(OSError, match="ibv_detach_mcast"):
        end.qp.detach_mcast(bytes(16))
    bare = bound(events, address)
    with pytest.raises(OSError, match="no queue pair"):
        await bare.join_multicast(GROUP)
    listener = bound(events, address)
    listener.listen()
    with pytest.raises(OSError, match="EINVAL"):
        await listener.join_multicast(GROUP, send_only=True)
    nowhere = ConnectionId(events, PortSpace.UDP)
    nowhere.bind_addr(("0.0.0.0", 0))
    with pytest.raises(OSError, match="bound to no device"):
        await nowhere.join_multicast(GROUP, send_only=True)
    stream = ConnectionId(events)
    stream.bind_addr((address, 0))
    with pytest.raises(OSError, match="not an id for datagrams"):
        await stream.join_multicast(GROUP)
    for part in (bare, listener, nowhere, stream, end):
        part.close()


@pytest.mark.parametrize("first", ["queue pair", "id", "channel"])
async def test_members_that_are_closed(address: str, first: str) -> None:
    """The kernel refuses to destroy a queue pair that is attached to a group."""
    channel = EventChannel()
    end = UDEnd(bound(channel, address))
    for group in (GROUP, MARKER):
        await end.cm_id.join_multicast(group)
    parts: list[Any] = [end.qp, end.cm_id, channel]
    parts.insert(0, parts.pop(("queue pair", "id", "channel").index(first)))
    for part in (*parts, *end.parts):
        part.close()
    for part in end.parts:
        await part.wait_closed(10)
    await channel.wait_closed(10)
    assert not joined(GROUP)


async def test_canceled_at_every_await(events: EventChannel, address: str, late: bool) -> None:
    end = UDEnd(bound(events, address))

    async def come_and_go() -> None:
        await end.cm_id.join_multicast(GROUP)
        await end.cm_id.leave_multicast(GROUP)

    for steps in every_step(late=late):
        await run_canceled(come_and_go(), steps)
        if not steps.canceled:
            break
        if GROUP in end.cm_id.groups:  # canceled between the two
            await end.cm_id.leave_multicast(GROUP)
        # The next one waits until this one is gone, and is taken for itself.
        event = await end.cm_id.join_multicast(MARKER)
        assert event.ah_attr is not None
        assert event.ah_attr.dgid[12:] == socket.inet_aton(MARKER)
        await end.cm_id.leave_multicast(MARKER)
        assert not joined(GROUP)
    assert steps.at > 2
    end.close()


@pytest.mark.kernel
async def test_two_groups_at_once(address: str) -> None:
    transport, _ = await create_datagram_endpoint(Recorder, (address, 0))
    await asyncio.gather(*(transport.join_group(group) for group in (GROUP, MARKER, GROUP)))
    assert joined(GROUP)
    assert joined(MARKER)
    transport.close()
    with pytest.raises(OSError, match="closed"):
        await transport.join_group(GROUP)
    await transport.wait_closed()
    assert not joined(GROUP)
