"""The native layer: below a connection, and small questions to a device."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

import aiordma
from aiordma import NotSupportedError, RdmaOSError
from aiordma.cm import ConnectionId, EventChannel, PortSpace, getaddrinfo
from aiordma.cm.addrinfo import AddressInfo
from aiordma.verbs import (
    SGE,
    CompletionQueue,
    ForkStatus,
    MemoryRegion,
    QPState,
    QPType,
    RecvWR,
    SendWR,
    fork_status,
)
from tests.device.ends import Ends

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

# Below a connection


async def test_a_connection_shows_its_native_parts(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        accepting = asyncio.create_task(listener.accept())
        async with aiordma.connect(address, listener.port) as client, await accepting as server:
            assert client.qp.num == client.get_extra_info("qpn")
            assert client.qp.state == QPState.RTS
            assert client.cm_id.destination == (address, listener.port)
            assert client.cm_id.qp is client.qp
            assert client.pd is client.qp.pd
            assert client.pd.context is client.cm_id.context
            # The connection counts the places: it takes no requests from others, and goes on.
            with MemoryRegion(client.pd, 64) as region:
                with pytest.raises(RdmaOSError, match="a connection posts"):
                    client.qp.post_send(SendWR(1, [SGE(region)]))
                with pytest.raises(RdmaOSError, match="a connection posts"):
                    client.qp.post_recv(RecvWR(1, [SGE(region)]))
                with pytest.raises(RdmaOSError, match="a connection posts"):
                    await client.qp.recv(region)
            await client.send(b"still there")
            assert await server.recv() == b"still there"
    assert client.qp.closed
    assert client.pd.closed
    assert client.cm_id.closed


# Questions to a device


async def test_partition_keys(ends: Ends, is_siw: bool) -> None:
    context = ends.client.context
    if is_siw:
        with pytest.raises(OSError, match="ibv_query_pkey"):
            context.query_pkey()
        return
    assert context.query_pkey() == context.query_pkey(1, 0) == 0xFFFF
    assert context.pkey_index(0xFFFF) == 0
    with pytest.raises(OSError, match="ibv_query_pkey"):
        context.query_pkey(1, 999)
    with pytest.raises(OSError, match="ibv_get_pkey_index"):
        context.pkey_index(0x1234)
    for wrong in (1 << 16, -1):
        with pytest.raises(ValueError, match="16 bits"):
            context.pkey_index(wrong)


async def test_the_index_of_a_device(ends: Ends) -> None:
    """The kernel's, which `rdma link` shows, too."""
    devices = aiordma.devices()
    numbers = [device.index for device in devices]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 0
    (device,) = (each for each in devices if each.name == ends.client.context.name)
    assert ends.client.context.index == device.index
    process = await asyncio.create_subprocess_exec(
        "rdma", "dev", "show", device.name, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output.startswith(f"{device.index}: {device.name}:".encode())


async def test_moderation_says_that_the_device_has_none(ends: Ends) -> None:
    with CompletionQueue(ends.client.context, 8) as cq:
        with pytest.raises(NotSupportedError, match="ibv_modify_cq"):
            cq.moderate(4, 10)
        for count, period in ((1 << 16, 0), (0, -1)):
            with pytest.raises(ValueError, match="16 bits"):
                cq.moderate(count, period)
        with pytest.raises(TypeError):
            cq.moderate(1.5, 1)  # type: ignore[arg-type]


def test_the_kernel_copies_registered_pages_at_a_fork() -> None:
    assert fork_status() in (ForkStatus.UNNEEDED, ForkStatus.DISABLED, ForkStatus.ENABLED)
    with open("/proc/version") as file:
        major, minor = map(int, file.read().split()[2].split(".")[:2])
    if (major, minor) >= (5, 12):
        assert fork_status() == ForkStatus.UNNEEDED


# Names


async def test_names_are_resolved_in_a_thread(address: str) -> None:
    (found,) = await getaddrinfo(address, 7471, numeric=True)
    assert found == AddressInfo(
        socket.AF_INET, QPType.RC, PortSpace.TCP, found.source, (address, 7471)
    )
    (listening,) = await getaddrinfo(address, "7471", passive=True)
    assert listening.source == (address, 7471)
    assert listening.destination is None
    (datagrams,) = await getaddrinfo(address, 1, port_space=PortSpace.UDP, numeric=True)
    assert (datagrams.qp_type, datagrams.port_space) == (QPType.UD, PortSpace.UDP)
    with EventChannel() as events, ConnectionId(events) as cm_id:
        assert found.destination is not None
        await cm_id.resolve_addr(found.destination)
        assert cm_id.context is not None


async def test_names_that_do_not_resolve() -> None:
    with pytest.raises(socket.gaierror):
        await getaddrinfo("no-such-host.invalid", 7471, numeric=True)
    for node, service, error in (
        (None, None, ValueError), ("a\0b", 1, ValueError), (5, 1, TypeError), ("a", 1.5, TypeError)
    ):  # fmt: skip
        with pytest.raises(error):
            await getaddrinfo(node, service)  # type: ignore[arg-type]


async def test_a_call_of_a_newer_library_names_the_release() -> None:
    with EventChannel() as events, ConnectionId(events) as cm_id:
        with pytest.raises(NotSupportedError, match="rdma-core 60") as caught:
            await cm_id.resolve_addrinfo("host", "service")
        assert caught.value.errno == errno.EOPNOTSUPP
