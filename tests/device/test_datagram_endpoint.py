"""create_datagram_endpoint: asyncio's datagram contract over RDMA."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma import DatagramAddress, create_datagram_endpoint
from aiordma.memory.governor import FIRST
from aiordma.metrics import snapshot
from aiordma_softroce.network import ADDRESS_V6
from tests.device.datagrams import Echo, Recorder, endpoint, where
from tests.device.forking import in_child, outcome, refusals, silences
from tests.device.shared import OVER_FABRIC, name_of_device
from tests.device.test_other_threads import refuse_all

pytestmark = pytest.mark.device


@pytest.mark.smoke
async def test_a_thousand_datagrams_there_and_back(address: str) -> None:
    """A window of the program's own keeps them from being lost; each byte is looked at."""
    rng = random.Random(11)
    count, window = 1000, 128
    async with (
        endpoint(Echo, (address, 0)) as server,
        endpoint(Recorder, remote_addr=where(server)) as client,
    ):
        mtu = client.transport.get_extra_info("mtu")
        sent = [
            n.to_bytes(4, "big") + rng.randbytes(rng.randrange(0, mtu - 4)) for n in range(count)
        ]
        for n, data in enumerate(sent):
            await client.until(lambda n=n: n - len(client.got) < window)
            client.transport.sendto(data)
        await client.until(lambda: len(client.got) >= count)
        assert client.data == sent  # one way through one device: in order, too
        assert server.data == sent
        assert {addr[:2] for _, addr in client.got} == {where(server)}
        (source,) = {addr for _, addr in server.got}
        assert source == DatagramAddress(address, 0, client.transport.get_extra_info("qpn"))
        assert not client.errors + server.errors


async def test_the_memory_of_an_endpoint_is_counted(address: str) -> None:
    """The budgets for messages are parts of what it leaves."""
    before = FIRST.pinned
    async with endpoint(Recorder, (address, 0)):
        (found,) = snapshot().datagrams
        assert found.pinned_bytes == FIRST.pinned - before > 0
    assert FIRST.pinned == before


async def test_the_calls_of_a_protocol(address: str) -> None:
    async with endpoint(Recorder, (address, 0)) as server:
        transport, client = await create_datagram_endpoint(Recorder, remote_addr=where(server))
        assert client.calls == ["made"]
        for n in range(20):
            transport.sendto(bytes([n]))
        transport.close()  # flushes
        assert transport.is_closing()
        transport.close()
        transport.sendto(b"too late")
        await client.until(lambda: client.calls[-1] == "lost")
        assert client.calls == ["made", "lost"]
        assert client.lost is None
        await server.until(lambda: len(server.got) >= 20)
        assert server.data == [bytes([n]) for n in range(20)]
        transport.abort()
        await transport.wait_closed()
        assert client.calls.count("lost") == 1


async def test_extra_info(address: str) -> None:
    async with (
        endpoint(Recorder, (address, 0)) as server,
        endpoint(Recorder, remote_addr=where(server)) as client,
    ):
        info = client.transport.get_extra_info
        assert info("peername") == where(server)
        assert info("sockname")[0] == address
        assert server.transport.get_extra_info("peername") is None
        assert (info("device"), info("port"), info("backend")) == (name_of_device(False), 1, "rdma")
        assert (info("transport"), info("link_layer")) == ("IB", "ETHERNET")
        assert info("gid")[12:] == socket.inet_aton(address)
        assert info("mtu") in (1024, 2048, 4096)
        assert info("qpn") != server.transport.get_extra_info("qpn")
        stand_in = info("socket")
        assert (stand_in.type, stand_in.proto) == (socket.SOCK_DGRAM, socket.IPPROTO_UDP)
        assert (stand_in.getsockname(), stand_in.getpeername()) == (info("sockname"), where(server))
        assert info("nothing", 5) == 5
        assert client.transport.get_protocol() is client
        assert address in repr(client.transport)


async def test_bad_calls(address: str) -> None:
    async with (
        endpoint(Recorder, (address, 0)) as server,
        endpoint(Recorder, remote_addr=where(server)) as client,
    ):
        mtu = client.transport.get_extra_info("mtu")
        for transport in (server.transport, client.transport):
            for data in ("text", 5, None, [1]):
                with pytest.raises(TypeError, match="bytes-like"):
                    transport.sendto(data, None)
        with pytest.raises(ValueError, match="must be None or"):
            client.transport.sendto(b"x", ("10.80.0.9", 5))
        with pytest.raises(aiordma.MessageTooLargeError, match=f"MTU of {mtu}"):
            client.transport.sendto(bytes(mtu + 1))
        with pytest.raises(ValueError, match="needs an address"):
            server.transport.sendto(b"x")
        for addr in (("name", 5), (address, 0), (address, 70000), (address, 0, 1 << 24)):
            with pytest.raises(ValueError, match=r"numeric|neither|not in"):
                server.transport.sendto(b"x", addr)
        for other in ("text", (address,), (5, address), [address, 5]):
            with pytest.raises(TypeError):
                server.transport.sendto(b"x", other)
        with pytest.raises(ValueError, match="high"):
            client.transport.set_write_buffer_limits(high=1, low=2)
        # None of it was sent, or left anything behind.
        for good in (bytearray(b"one"), memoryview(b"-two-")[1:4], memoryview(b"t1h2r3")[::2]):
            client.transport.sendto(good, where(server))
        await server.until(lambda: len(server.got) >= 3)
        assert server.data == [b"one", b"two", b"thr"]


async def test_bad_arguments(address: str) -> None:
    async def make(**options: Any) -> None:
        await create_datagram_endpoint(Recorder, **options)

    here = (address, 0)
    for options, words in (
        ({}, "needs local_addr, remote_addr or group"),
        ({"local_addr": here, "sock": socket}, "no socket"),
        ({"local_addr": here, "reuse_port": True}, "reuse_port"),
        ({"local_addr": here, "allow_broadcast": True}, "no broadcast"),
        ({"local_addr": here, "family": socket.AF_UNIX}, "AF_INET"),
        ({"local_addr": here, "family": socket.AF_INET6}, "not of the family"),
        ({"local_addr": here, "proto": socket.IPPROTO_TCP}, "IPPROTO_UDP"),
        ({"local_addr": (address, 70000)}, "not in 0..65535"),
        ({"remote_addr": (address, 0)}, "neither a port"),
        ({"local_addr": here, "group": address}, "not a multicast address"),
    ):
        with pytest.raises(ValueError, match=words):
            await make(**options)
    with pytest.raises(TypeError, match="DatagramConfig"):
        await make(local_addr=here, config=5)
    with pytest.raises(TypeError, match="tuple"):
        await make(local_addr=address)
    with pytest.raises(OSError, match="EADDRNOTAVAIL"):
        await make(local_addr=("10.99.99.99", 0))

    def fails() -> Recorder:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await create_datagram_endpoint(fails, local_addr=here)
    async with endpoint(Recorder, here) as first:
        with pytest.raises(OSError, match="EADDRINUSE"):
            await make(local_addr=where(first))


async def test_a_connected_endpoint_hears_its_peer_alone(address: str) -> None:
    async with (
        endpoint(Echo, (address, 0)) as server,
        endpoint(Recorder, (address, 0)) as stranger,
        endpoint(Recorder, remote_addr=where(server)) as client,
    ):
        mine = DatagramAddress(address, 0, client.transport.get_extra_info("qpn"))
        stranger.transport.sendto(b"who are you?", mine)
        # Flushed before anybody else sends: the stranger's comes first, if it comes.
        stranger.transport.close()
        await stranger.until(lambda: "lost" in stranger.calls)
        client.transport.sendto(b"marker")
        await client.until(lambda: bool(client.got))
        assert client.data == [b"marker"]


async def test_a_wildcard_stands_for_the_one_device(address: str) -> None:
    for host in ("0.0.0.0", "", None):
        async with endpoint(Echo, (host, 0)) as server:
            port = where(server)[1]
            async with endpoint(Recorder, remote_addr=(address, port)) as client:
                client.transport.sendto(b"x")
                await client.until(lambda client=client: client.data == [b"x"])


async def test_ipv6(address: str) -> None:
    # The kernel is asked for the way to it, too, and knows none to an address of the fabric alone.
    host = "::1" if OVER_FABRIC else ADDRESS_V6
    async with (
        endpoint(Echo, (host, 0)) as server,
        endpoint(Recorder, remote_addr=where(server)) as client,
    ):
        client.transport.sendto(b"six")
        await client.until(lambda: client.data == [b"six"])
        assert client.got[0][1][:2] == where(server)[:2]
        assert server.got[0][1].host == host


async def test_the_example(address: str) -> None:
    program = Path(__file__).parents[2] / "examples" / "datagrams.py"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", str(program), address), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, output) == (0, b"b'HELLO'\nb'TO EVERYBODY IN THE GROUP'\n")


async def test_j02_a_datagram_transport_refuses_other_loops(address: str) -> None:
    async with endpoint(Recorder, (address, 0)) as one:
        transport = one.transport
        here = where(one)
        await refuse_all({
            "sendto": lambda: transport.sendto(b"x", here),
            "close": transport.close,
            "abort": transport.abort,
        })  # fmt: skip
        groups = {
            "join": lambda: transport.join_group("239.80.0.1"),
            "leave": lambda: transport.leave_group("239.80.0.1"),
        }
        await refuse_all(groups, coroutines=True)
        assert not transport.is_closing()
        transport.sendto(b"on", here)
        await one.until(lambda: one.data == [b"on"])


async def test_b05_what_fails_is_named(address: str) -> None:
    """The address that a call was about stands in front of its error."""
    async with endpoint(Recorder, (address, 0)) as one:
        host, port = where(one)
        unreachable = "fd99::1"
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"local_addr": (host, port)}, rf"{host} port {port}: "),
            ({"local_addr": ("10.99.99.99", 5)}, r"10\.99\.99\.99 port 5: "),
            ({"remote_addr": (host, 1)}, rf"{host} port 1: "),
            ({"remote_addr": (unreachable, 7)}, rf"{unreachable} port 7: "),
        ]
        if not OVER_FABRIC:  # the kernel joins no IPv6 group on RoCE v2; adapters do
            wrong.append(({"group": "ff0e::1"}, "group ff0e::1: "))
        for options, words in wrong:
            with pytest.raises(OSError, match=words) as caught:
                await create_datagram_endpoint(Recorder, **options)
            assert str(caught.value).count(" port ") <= 1, "said twice"
        one.transport.sendto(b"x", (host, 1))
        one.transport.sendto(b"x", (unreachable, 7))
        await one.until(lambda: len(one.errors) == 2)
        said = "\n".join(map(str, one.errors))
        assert f"{host} port 1: " in said
        assert f"{unreachable} port 7: " in said


async def test_a06_datagrams_in_a_forked_child(address: str) -> None:
    async with (
        endpoint(Echo, local_addr=(address, 0)) as server,
        endpoint(Recorder, remote_addr=where(server)) as client,
    ):
        transport = client.transport
        bound = transport.sendto

        def child() -> Iterable[str]:
            yield from refusals(transport, server.transport)
            yield from silences(transport, server.transport)
            if (said := outcome(lambda: bound(b"of the child"))) != "ForkedError":
                yield f"bound before: {said}"

        await in_child(child)
        transport.sendto(b"of the parent")
        await client.until(lambda: client.got)
        assert client.data == [b"of the parent"]
