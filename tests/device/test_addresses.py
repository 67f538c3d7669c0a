"""Ports, families, names and races between addresses, shown by what the device does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma import ConnectionConfig
from aiordma.cm import (
    ConnectionId,
    EventChannel,
    EventType,
    Option,
)
from aiordma.cm import address as address_module
from aiordma.link import dialing
from aiordma_softroce.network import ADDRESS_V6
from tests.device.meeting import meet, part
from tests.device.shared import OVER_FABRIC

pytestmark = pytest.mark.device

NOBODY = "10.80.0.77"


# Ports and addresses


async def test_connections_share_a_local_port(address: str, is_siw: bool) -> None:
    async with aiordma.listen(address, 0) as one, aiordma.listen(address, 0) as two:
        local = (address, 7777)
        first = await meet(one, address, local_addr=local, reuse_address=True)
        with pytest.raises(OSError, match="reuse_address for both") as caught:
            await aiordma.connect(address, two.port, local_addr=local)
        assert caught.value.errno == errno.EADDRINUSE
        second = await meet(two, address, local_addr=local, reuse_address=True)
        assert first[1].get_extra_info("peername") == local
        assert second[1].get_extra_info("peername") == local
        again = meet(one, address, local_addr=local, reuse_address=True)
        if is_siw:  # the four numbers would be those of a TCP connection that is there
            with pytest.raises(OSError, match="EADDRNOTAVAIL") as caught:
                await again
            assert caught.value.errno == errno.EADDRNOTAVAIL
        else:
            await part(*await again)
        await part(*first, *second)


async def test_two_listeners_never_share_a_port(events: EventChannel, address: str) -> None:
    """Whatever REUSEADDR says: it is for the ids that do not listen."""
    ids = [ConnectionId(events) for _ in range(3)]
    for cm_id in ids[:2]:
        cm_id.set_option(Option.ID_REUSEADDR, 1)
        cm_id.bind_addr((address, 7471))
    with pytest.raises(OSError, match="another listener has this port") as caught:
        ids[0].listen()
    assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match="rdma_bind_addr: EADDRINUSE"):
        ids[2].bind_addr((address, 7471))
    ids[1].close()
    await ids[1].wait_closed()
    ids[0].listen()
    for wildcard in ("", "0.0.0.0", "::"):
        # The kernel says EADDRNOTAVAIL, as for an address that is not here.
        with pytest.raises(OSError, match="another listener has this port") as caught:
            ids[2].bind_addr((wildcard, 7471))
        assert caught.value.errno == errno.EADDRINUSE
    ids.append(ConnectionId(events))
    with pytest.raises(OSError, match="no interface of this host has the address") as caught:
        ids[3].bind_addr(("10.99.0.1", 7471))
    assert caught.value.errno == errno.EADDRNOTAVAIL
    for cm_id in ids:
        cm_id.close()


def link_local() -> str:
    """The card's link-local address with its interface."""
    shown = subprocess.run(
        ["ip", "-6", "-o", "address", "show", "scope", "link", "dev", "dummy0"],
        capture_output=True, check=True, text=True,
    )  # fmt: skip
    return shown.stdout.split()[3].partition("/")[0] + "%dummy0"


FAMILIES = [
    ("0.0.0.0", False, (4,)),
    ("::", True, (6,)),
    ("::", False, (4, 6)),
    ("", False, (4, 6)),
    (None, False, (4, 6)),
    (None, True, (6,)),
    ("v4", False, (4,)),
    ("v6", False, (6,)),
    ("link-local", False, (-6,)),
]


@pytest.mark.parametrize(("host", "ipv6_only", "families"), FAMILIES)
@pytest.mark.kernel
async def test_listeners_and_families(
    address: str, is_siw: bool, host: str | None, ipv6_only: bool, families: tuple[int, ...]
) -> None:
    hosts = {4: address, 6: ADDRESS_V6, -6: link_local()}
    named = {"v4": address, "v6": ADDRESS_V6, "link-local": hosts[-6]}
    async with aiordma.listen(named.get(host or "", host), 0, ipv6_only=ipv6_only) as listener:
        assert len({port for _, port in listener.socknames}) == 1
        assert len(listener.socknames) == (2 if families == (4, 6) else 1)
        for family, target in hosts.items():
            if family in families or (family == -6 and len(listener.socknames) == 2):
                client, server = await meet(listener, target)
                await client.send(b"hello")
                assert bytes(await server.recv()) == b"hello"
                own, _, *more = server.get_extra_info("peername")
                assert own == target.partition("%")[0]
                # A request does not tell the interface; to software iWARP its socket does.
                assert any(more) == (family == -6 and is_siw)
                await part(client, server)
            elif family != -6:
                with pytest.raises(aiordma.ConnectionRejectedError) as caught:
                    await aiordma.connect(target, listener.port)
                # Somebody listens on the port, though not for this address: not reason 8.
                assert caught.value.status == (-errno.ECONNREFUSED if is_siw else 28)
        if 4 in families:
            mapped = f"::ffff:{address}"
            await part(*await meet(listener, mapped))


async def test_an_id_on_both_families(events: EventChannel, address: str, is_siw: bool) -> None:
    """What `listen` does not use: software iWARP resets the IPv4 clients of such an id."""
    async with aiordma.listen(address, 0) as other:  # for its port number alone
        port = other.port
    for only in (False, True):
        cm_id = ConnectionId(events)
        cm_id.set_option(Option.ID_AFONLY, only)
        cm_id.bind_addr(("::", port))
        cm_id.listen()
        for target in (address, ADDRESS_V6):
            connecting = asyncio.create_task(
                aiordma.connect(target, port, config=ConnectionConfig(raw=True)).__aenter__()
            )
            if target == ADDRESS_V6 or not (only or is_siw):
                event = await events.get_event(10)
                assert event is not None
                assert event.type == EventType.CONNECT_REQUEST
                assert event.connection_id is not None
                event.ack()
                event.connection_id.reject()
                event.connection_id.close()
            with pytest.raises(ConnectionRefusedError):
                await connecting
        cm_id.close()
        await cm_id.wait_closed()


@pytest.fixture
def names(address: str, tmp_path: Path) -> Iterator[str]:
    """A name for both addresses of the device, and for two that no device has."""
    hosts = tmp_path / "hosts"
    name = "two-families.test"
    hosts.write_text(f"127.0.0.1 localhost {name}\n{ADDRESS_V6} {name}\n{address} {name}\n")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    yield name
    subprocess.run(["umount", "/etc/hosts"], check=True)


@pytest.mark.kernel
async def test_names(names: str, address: str) -> None:
    """A listener on a name takes all its addresses, a client whichever answers first."""
    async with aiordma.listen(names, 0) as listener:
        hosts = {host for host, _ in listener.socknames}
        assert {address, ADDRESS_V6} <= hosts
        for host in hosts & {address, ADDRESS_V6}:
            await part(*await meet(listener, host))
        client, server = await meet(listener, names)
        assert client.get_extra_info("peername")[0] in hosts
        await part(client, server)
        with pytest.raises(OSError, match="another listener has this port"):
            await aiordma.listen(names, listener.port)
    async with aiordma.listen(names, listener.port, ipv6_only=True) as listener:
        assert listener.socknames == [(ADDRESS_V6, listener.port)]
    with pytest.raises(socket.gaierror):
        await aiordma.listen("no-such-host.invalid", 0)
    with pytest.raises(socket.gaierror):
        await aiordma.connect("no-such-host.invalid", 7)


@pytest.mark.kernel
async def test_a_name_without_a_device() -> None:
    with pytest.raises(OSError, match="no RDMA device serves this address"):
        await aiordma.connect("localhost", 7471)


# Happy eyeballs


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names that the resolver knows."""
    names: dict[str, list[str]] = {}

    async def look_up(host: str, port: int) -> list[tuple[str, int]]:
        if host in names:
            return [(address, port) for address in names[host]]
        return await address_module.look_up(host, port)

    monkeypatch.setattr(dialing, "look_up", look_up)
    return names


@pytest.fixture(scope="module")
def impatient_tcp() -> Iterator[None]:
    """Software iWARP connects by TCP, in a call that cannot be ended: 3 seconds, not 130.

    For the module, so that it still holds while `clean` waits for the end of the call.
    """
    if OVER_FABRIC:  # no TCP connects, and that of this machine is others' business
        yield
        return
    retries = Path("/proc/sys/net/ipv4/tcp_syn_retries")
    before = retries.read_text()
    retries.write_text("1")
    yield
    retries.write_text(before)


@pytest.mark.usefixtures("impatient_tcp")
async def test_a_dead_address_costs_the_head_start(address: str, known: dict[str, Any]) -> None:
    known["half-dead"] = [NOBODY, address]
    loop = asyncio.get_running_loop()
    async with aiordma.listen(address, 0) as listener:
        begun = loop.time()
        client, server = await meet(listener, "half-dead")
        took = loop.time() - begun
        assert client.get_extra_info("peername")[0] == address
        await part(client, server)
        assert 0.24 < took < 2, f"{took} s"
        # One after the other, the dead one takes the time of its resolution.
        with pytest.raises(TimeoutError):
            await aiordma.connect(
                "half-dead", listener.port, happy_eyeballs_delay=None, timeout=0.5
            )


async def test_the_loser_of_a_race_leaves_nothing(address: str, known: dict[str, Any]) -> None:
    """Both addresses are the listener's; what the loser has begun is undone on both sides."""
    known["both"] = [ADDRESS_V6, address]
    async with aiordma.listen(None, 0) as listener:
        for _ in range(10):
            client = await aiordma.connect("both", listener.port, happy_eyeballs_delay=0)
            host = client.get_extra_info("peername")[0]
            async for server in listener:
                if server.get_extra_info("peername") == client.get_extra_info("sockname"):
                    break
                server.abort()
                await server.wait_closed()
            await client.send(host.encode())
            assert bytes(await server.recv()) == host.encode()
            await part(client, server)


# Where from


@pytest.mark.kernel
async def test_local_address_and_port(address: str) -> None:
    async with aiordma.listen(None, 0) as listener:
        for host, target in ((address, address), (ADDRESS_V6, ADDRESS_V6), ("", address)):
            for port in (0, 7801):
                client, server = await meet(listener, target, local_addr=(host, port))
                sockname = client.get_extra_info("sockname")
                assert sockname == server.get_extra_info("peername")
                assert sockname[2:] == ((0, 0) if ":" in target else ()), "as with asyncio's"
                assert sockname[0] == (host or address)
                assert sockname[1] == port or (not port and sockname[1])
                await part(client, server)


PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.fixture
def ports_of_tcp(address: str) -> Iterator[list[int]]:
    """The system gives away 16 local ports, of which sockets of TCP have a quarter.

    None of them has a connection that ended a moment ago: the system does not give them away.
    """
    before, taken = PORTS.read_text(), list(range(20000, 20016, 4))
    PORTS.write_text("20000 20015")
    try:
        with contextlib.ExitStack() as stack:
            for port in taken:
                stack.enter_context(socket.socket()).bind((address, port))
            yield taken
    finally:
        PORTS.write_text(before)


@pytest.mark.kernel
async def test_any_port_is_one_that_tcp_has_not(
    address: str, ports_of_tcp: list[int], is_siw: bool
) -> None:
    """Of all programs of a machine, few know what ports the others have."""
    ports: list[int] = []
    for _ in range(12):
        async with aiordma.listen(address, 0) as listener:
            client, server = await meet(listener, address)
            ports += [listener.port, client.get_extra_info("sockname")[1]]
            await part(client, server)

    async def end(_: object, writer: aiordma.RdmaStreamWriter) -> None:
        writer.close()

    for _ in range(12):
        async with await aiordma.start_server(end, address, 0) as streams:
            _, writer = await aiordma.open_connection(address, streams.port)
            ports += [streams.port, writer.get_extra_info("sockname")[1]]
            writer.close()
            await writer.wait_closed()
    assert set(ports) <= set(range(20000, 20016))
    if is_siw:
        assert not set(ports) & set(ports_of_tcp)
        async with aiordma.listen(address, 7801) as listener:
            with pytest.raises(OSError, match="a TCP socket has the local port") as caught:
                await meet(listener, address, local_addr=(address, ports_of_tcp[0]))
            assert caught.value.errno == errno.EADDRINUSE


@pytest.fixture
def nonlocal_bind() -> Iterator[None]:
    """Any address can be bound, whether an interface has it or not."""
    setting = Path("/proc/sys/net/ipv4/ip_nonlocal_bind")
    before = setting.read_text()
    setting.write_text("1")
    yield
    setting.write_text(before)


@pytest.mark.usefixtures("nonlocal_bind")
async def test_an_absent_address_is_no_taken_port() -> None:
    for port in (0, 7802):
        with pytest.raises(OSError, match=r"10\.99\.0\.1") as caught:
            await aiordma.listen("10.99.0.1", port)
        assert caught.value.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)


async def test_local_addresses_that_do_not_do(address: str, known: dict[str, Any]) -> None:
    async with aiordma.listen(None, 0) as listener:

        async def refused(local: Any, code: int, text: str, host: str = address) -> None:
            with pytest.raises(OSError, match=text) as caught:
                await aiordma.connect(host, listener.port, local_addr=local, timeout=5)
            assert caught.value.errno == code

        await refused(("10.99.0.1", 0), errno.EADDRNOTAVAIL, "has the local address")
        await refused((ADDRESS_V6, 0), errno.EAFNOSUPPORT, "has the family of the local address")
        await refused(("fe80::1%no-card", 0), errno.ENODEV, "no network interface", ADDRESS_V6)
        known["both"] = [ADDRESS_V6, address]
        # Only the addresses of its family are tried.
        client, server = await meet(listener, "both", local_addr=(address, 0))
        assert client.get_extra_info("peername")[0] == address
        await part(client, server)
    for local in ("10.80.0.1", (1, 2), ("10.80.0.1",), ("10.80.0.1", "7")):
        with pytest.raises(TypeError, match="a pair of str and int"):
            aiordma.connect(address, 7, local_addr=local)  # type: ignore[arg-type]
    for port in (-1, 65536):
        with pytest.raises(ValueError, match=r"not in 0\.\.65535"):
            aiordma.connect(address, 7, local_addr=(address, port))
    for delay in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="happy_eyeballs_delay"):
            aiordma.connect(address, 7, happy_eyeballs_delay=delay)
    with pytest.raises(ValueError, match="name its interface"):
        await aiordma.connect("fe80::1", 7)


# Loopback, and what errors name


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
@pytest.mark.kernel
async def test_loopback_that_no_device_serves_is_refused_at_listen(host: str) -> None:
    words = r"port \d+: no RDMA device serves this address \(listen on an address of a device"
    for listening in (
        aiordma.listen(host, 0),
        aiordma.listen(host, 7471),
        aiordma.start_server(lambda reader, writer: None, host, 0),
    ):
        with pytest.raises(aiordma.DeviceNotFoundError, match=words) as caught:
            await listening
        assert caught.value.errno == errno.ENODEV
        assert "None or" in caught.value.hint


async def test_errors_of_connects_and_listeners_name_host_and_port(address: str) -> None:
    async def failing(awaitable: Any) -> str:
        with pytest.raises(OSError, match=" port ") as caught:
            await awaitable
        assert caught.value.strerror == caught.value.args[1]
        return str(caught.value.strerror)

    def serve(host: str, port: int) -> Any:
        return aiordma.start_server(lambda reader, writer: None, host, port)

    async with aiordma.listen(address, 0) as listener:
        taken = listener.port
        for listening in (aiordma.listen(address, taken), serve(address, taken)):
            assert (await failing(listening)).startswith(f"{address} port {taken}: rdma_")
    for connect in (aiordma.connect, aiordma.open_connection):
        for host, words in (
            (address, "connection rejected"),
            ("192.0.2.1", "(rdma_resolve_addr|ADDR_ERROR): ENETUNREACH"),
            ("127.0.0.1", "connection rejected" if address == "127.0.0.1" else "rdma_resolve_"),
        ):
            text = await failing(connect(host, 9, timeout=20))
            assert re.match(f"{re.escape(host)} port 9: {words}", text), text
            assert text.count(host) == 1 or host == "127.0.0.1", text
    for listening in (aiordma.listen("192.0.2.1", 9), serve("192.0.2.1", 9)):
        text = await failing(listening)
        assert text.startswith("192.0.2.1 port 9: rdma_bind_addr: EADDRNOTAVAIL")
    with pytest.raises(socket.gaierror, match=r"no-such-host\.invalid"):
        await aiordma.connect("no-such-host.invalid", 7)
