"""create_datagram_endpoint: asyncio's, over RDMA."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from aiordma.arguments import check_kind, whole
from aiordma.cm.address import Address, look_up
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.enums import PortSpace
from aiordma.cm.multicast import group_host
from aiordma.datagram.config import DatagramConfig
from aiordma.datagram.port import DatagramPort
from aiordma.datagram.transport import RdmaDatagramTransport
from aiordma.errors import HostNotFoundError, prefix_subject
from aiordma.link.dialing import shared_channel, warm_up
from aiordma.loop.limit import Limit
from aiordma.loop.workers import call_blocking
from aiordma.verbs.ah import host_of
from aiordma.verbs.device import devices
from aiordma.verbs.enums import GIDType, TransportType

__all__ = ["create_datagram_endpoint"]

P = TypeVar("P", bound=asyncio.BaseProtocol)
_FAMILIES = (0, socket.AF_INET, socket.AF_INET6)
_PROTOCOLS = (0, socket.IPPROTO_UDP)


async def create_datagram_endpoint(
    protocol_factory: Callable[[], P],
    local_addr: tuple[str | None, int] | None = None,
    remote_addr: tuple[str, int] | None = None,
    *,
    family: int = 0,
    proto: int = 0,
    flags: int = 0,
    reuse_port: bool | None = None,
    allow_broadcast: bool | None = None,
    sock: Any = None,
    group: str | Address | None = None,
    config: DatagramConfig | None = None,
) -> tuple[RdmaDatagramTransport, P]:
    """Create a datagram endpoint over RDMA, as `loop.create_datagram_endpoint` does over UDP.

    The datagrams are those of RDMA (queue pairs of type UD) and not UDP, so both sides need RDMA,
    and a datagram is limited to the MTU of the port.  An address (host, port) names a service,
    which the connection manager resolves for the first datagram.  The other side can be any program
    that uses librdmacm's port space UDP (`rdma_cm(7)`).

    Args:
        protocol_factory: Makes the `asyncio.DatagramProtocol`.
        local_addr: The (host, port) under which others find the endpoint; port 0 lets the kernel
            choose.  The host may be empty or a wildcard if the machine has a single RDMA device for
            datagrams.
        remote_addr: The (host, port) to send to, which is then the only sender accepted; or a
            multicast group to send to.  It is resolved before the call returns.
        family: AF_INET, AF_INET6, or 0, for the resolution of names.
        proto: 0 or IPPROTO_UDP.
        flags: The flags for getaddrinfo.
        reuse_port: Not supported, because a port belongs to one endpoint.
        allow_broadcast: Not supported, because RDMA has multicast but no broadcast.
        sock: Not supported, because there is no socket.
        group: A multicast group to receive from; see also `RdmaDatagramTransport.join_group`.
        config: The settings.

    Returns:
        The transport and the protocol, whose `connection_made` has been called.

    Raises:
        ValueError: An argument is not supported by RDMA, or there is neither an address nor a
            group.
        socket.gaierror: A name does not resolve.
        LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or the address belongs
            to no RDMA device.
        NotSupportedError: The device is an iWARP device, which has no datagrams.
        ConnectionRejectedError: No program listens at `remote_addr`, or it has refused.
        ConnectTimeoutError: There was no answer from `remote_addr`.
        TimeoutError: A name, or the device, was not found within twice `config.resolve_timeout_s`.
        OSError: The local port is in use (EADDRINUSE), or there are not enough resources.

    Cancellation: the endpoint and all its resources are closed.
    """
    _refuse(family, proto, reuse_port, allow_broadcast, sock)
    if local_addr is None and remote_addr is None and group is None:
        msg = "a datagram endpoint needs local_addr, remote_addr or group"
        raise ValueError(msg)
    groups = group_host(group) if group is not None else None
    config = config or DatagramConfig()
    if not isinstance(config, DatagramConfig):
        msg = f"not a DatagramConfig: {config!r}"
        raise TypeError(msg)
    await warm_up()
    look_up = (2 * config.resolve_timeout_s, family, proto, flags)
    remote = await _numeric(remote_addr, "remote_addr", *look_up) if remote_addr else None
    local = await _numeric(local_addr, "local_addr", *look_up) if local_addr else None
    hint = "is it an address of an RDMA device, and does its network answer? See resolve_timeout_s"
    ends = (local and f"on {_words(local)}", remote and f"to {_words(remote)}")
    what = " ".join(("opening a datagram endpoint", *filter(None, ends)))
    with Limit(2 * config.resolve_timeout_s, what, hint):
        host = await _own_host(local, remote, groups, config)
        try:
            port = await DatagramPort.open(host, local, config)
        except OSError as exc:
            prefix_subject(exc, _words(local) if local else host)
            raise
    transport = RdmaDatagramTransport(asyncio.get_running_loop(), port, config)
    try:
        if remote is not None:
            await transport._connect(remote)
        if groups is not None:
            try:
                await transport.join_group(groups, timeout=config.resolve_timeout_s)
            except OSError as exc:
                prefix_subject(exc, f"group {groups}")
                raise
        protocol = protocol_factory()
        await transport._start(protocol)
    except BaseException:
        transport.abort()
        raise
    return transport, protocol


def _refuse(
    family: int, proto: int, reuse_port: bool | None, allow_broadcast: bool | None, sock: Any
) -> None:
    """Refuse arguments that only sockets support."""
    refused = (
        (sock is not None, "sock is not possible: an RDMA endpoint has no socket"),
        (reuse_port, "reuse_port is not possible: an RDMA port belongs to one endpoint"),
        (allow_broadcast, "allow_broadcast is not possible: RDMA has groups, and no broadcast"),
        (family not in _FAMILIES, f"family is AF_INET, AF_INET6 or 0, not {family!r}"),
        (proto not in _PROTOCOLS, f"proto is IPPROTO_UDP or 0, not {proto!r}"),
    )
    for wrong, msg in refused:
        if wrong:
            raise ValueError(msg)


async def _numeric(
    address: tuple[str | None, int], name: str, seconds: float, family: int, proto: int, flags: int
) -> Address:
    """Return the address with a numeric host; without a host, a wildcard."""
    if not isinstance(address, tuple) or len(address) < 2:
        msg = f"{name} is a tuple (host, port), not {address!r}"
        raise TypeError(msg)
    host, port = address[:2]
    port = whole(f"the port of {name}", port, 0, 0xFFFF)
    check_kind(f"the host of {name}", host, str)
    if not host:
        return "::" if family == socket.AF_INET6 else "0.0.0.0", port
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        try:
            with Limit(seconds, f"resolving {name} {host}", "does the name server answer?"):
                kind = socket.SOCK_DGRAM
                found = await look_up(
                    host, port, family=family, type=kind, proto=proto, flags=flags
                )
                return found[0]
        except HostNotFoundError as exc:
            raise HostNotFoundError(exc.errno, f"{name} {exc.strerror}") from None
    if family and (family == socket.AF_INET) != (version == 4):
        msg = f"{name} {host} is not of the family {socket.AddressFamily(family).name}"
        raise ValueError(msg)
    return host, port


def _words(address: Address) -> str:
    return f"{address[0]} port {address[1]}"


def _is_wildcard(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_unspecified


async def _own_host(
    local: Address | None, remote: Address | None, group: str | None, config: DatagramConfig
) -> str:
    """Return the local address of the device that the endpoint belongs to."""
    if local is not None and not _is_wildcard(local[0]):
        return local[0]
    if remote is not None:
        return await _source_for(remote, config)
    if local is not None:
        wildcard = local[0]
        return await call_blocking(lambda: _only_host(wildcard), undo=lambda _: None)
    assert group is not None
    return await _source_for((group, 0), config)


async def _source_for(target: Address, config: DatagramConfig) -> str:
    """Return the local address that the routes choose for `target`."""
    channel, release = shared_channel()
    try:
        asking = ConnectionId(channel, PortSpace.UDP)
        asking._sink = lambda _: True
        try:
            try:
                await asking.resolve_addr(
                    (target[0], target[1] or 1), timeout=config.resolve_timeout_s
                )
            except OSError as exc:
                prefix_subject(exc, _words(target) if target[1] else f"group {target[0]}")
                raise
            source = asking.source_address
            assert source is not None
            return source
        finally:
            asking.close()
    finally:
        release()


def _only_host(wildcard: str) -> str:
    """Return the address of the only device that a wildcard can mean.

    Raises:
        ValueError: There are several devices, or none.
    """
    version = ipaddress.ip_address(wildcard).version
    hosts: dict[str, list[str]] = {}
    for device in devices():
        if device.transport == TransportType.IWARP:
            continue
        with device.open() as context:
            for entry in context.gid_table():
                ip = ipaddress.ip_address(host_of(entry.gid))
                if entry.type == GIDType.ROCE_V2 and ip.version == version and not ip.is_link_local:
                    hosts.setdefault(device.name, []).append(str(ip))
    if len(hosts) != 1:
        found = ", ".join(f"{name}: {', '.join(ips)}" for name, ips in hosts.items()) or "none"
        msg = (
            f"local_addr {wildcard!r} has to name a device by its address, because a datagram "
            f"endpoint belongs to one; devices with such addresses: {found}"
        )
        raise ValueError(msg)
    return next(iter(hosts.values()))[0]
