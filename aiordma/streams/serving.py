"""create_server and start_server: asyncio's, over RDMA."""

from __future__ import annotations

import asyncio
import socket
import ssl as ssl_module
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiordma.arguments import check_kind, whole
from aiordma.cm.address import Address, check_port
from aiordma.link.dialing import warm_up
from aiordma.link.limits import DEFAULT_LIMITS, ListenerLimits
from aiordma.link.listening import choose, require_device, resolve
from aiordma.loop import fork
from aiordma.streams.server import RdmaServer
from aiordma.streams.sockets import only_ipv6, take_place
from aiordma.streams.stream_config import DEFAULTS, StreamConfig
from aiordma.streams.stream_reader import RdmaStreamReader, RdmaStreamWriter

__all__ = ["create_server", "start_server"]

_LIMIT = 64 * 1024


async def create_server(
    protocol_factory: Callable[[], Any],
    host: str | Sequence[str] | None = None,
    port: int | str | None = None,
    *,
    family: int = socket.AF_UNSPEC,
    flags: int = socket.AI_PASSIVE,
    sock: socket.socket | None = None,
    backlog: int = 100,
    ssl: ssl_module.SSLContext | None = None,
    reuse_address: bool | None = None,
    reuse_port: bool | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    start_serving: bool = True,
    config: StreamConfig | None = None,
    limits: ListenerLimits | None = None,
) -> RdmaServer:
    """Serve streams; `loop.create_server` over RDMA.

    Clients may be aiordma's, or any program that uses rsockets, such as one under
    `librspreload.so` (`rsocket(7)`).

    Args:
        protocol_factory: Called for the protocol of each connection.
        host: Local name or address, or several; None or "" for all.
        port: A number or the name of a service; 0 or None lets the kernel choose, see
            `RdmaServer.port`.
        family: `socket.AF_INET` or `AF_INET6` for that family alone.
        flags: Of no use; for the signature's sake.
        sock: Instead of host and port: a stream socket of IPv4 or IPv6 that is bound, or not even
            that, and neither listens nor is connected.  The server listens on its address in its
            place, keeps the port with it, and closes it in the end.
        backlog: Requests that may wait, those in the middle of the handshake included; TLS
            handshakes are not among them.  More are refused, and aiordma's clients try again.
        ssl: A context, to speak TLS.
        reuse_address: Of no use: an address is free as soon as its server is gone.
        reuse_port: Not True: two servers cannot share a port.
        ssl_handshake_timeout: Seconds for the TLS handshake, 60 by default.
        ssl_shutdown_timeout: Seconds for the end of TLS, 30 by default.
        start_serving: Accept at once; otherwise from `start_serving()` or `serve_forever()` on.
        config: Settings of the connections.
        limits: What clients may hold, in total and for each source; see docs/limits.md.

    Raises:
        TypeError, ValueError: An argument is of no use.
        LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or no RDMA device has
            the address, as seldom one has an address of loopback ("localhost").
        HostNotFoundError: The name does not resolve.
        TimeoutError: It does not within `config.connect_timeout_s`.
        OSError: The port is taken (EADDRINUSE).

    Cancellation: what was begun is undone.
    """
    if isinstance(ssl, bool):
        msg = "ssl argument must be an SSLContext or None"
        raise TypeError(msg)
    for name, seconds in (
        ("ssl_handshake_timeout", ssl_handshake_timeout),
        ("ssl_shutdown_timeout", ssl_shutdown_timeout),
    ):
        if seconds is not None and ssl is None:
            msg = f"{name} is only meaningful with ssl"
            raise ValueError(msg)
    if sock is not None and (host is not None or port is not None):
        msg = "host/port and sock can not be specified at the same time"
        raise ValueError(msg)
    if reuse_port:
        msg = "reuse_port is not supported: two RDMA servers cannot share a port"
        raise ValueError(msg)
    if family not in (socket.AF_UNSPEC, socket.AF_INET, socket.AF_INET6):
        msg = f"family {family} is neither AF_INET nor AF_INET6"
        raise ValueError(msg)
    check_kind("config", config, StreamConfig)
    if whole("backlog", backlog) < 1:
        msg = f"backlog {backlog} is not positive"
        raise ValueError(msg)
    if sock is not None:
        host, port = take_place(sock)
        family = socket.AF_INET6 if only_ipv6(sock) else socket.AF_UNSPEC
    number = socket.getservbyname(port, "tcp") if isinstance(port, str) else port or 0
    check_port(number)
    config = config or DEFAULTS
    hosts = [host] if host is None or isinstance(host, str) else list(host)
    await warm_up()
    found: list[Address] = []
    for each in hosts:
        found += await resolve(each or None, number, config.connect_timeout_s)
    if family:
        v6 = family == socket.AF_INET6
        found = [address for address in found if (":" in address[0]) == v6]
        if not found:
            msg = f"no address of {host!r} has the family {family}"
            raise ValueError(msg)
    only_v6 = family == socket.AF_INET6
    addresses = choose(list(dict.fromkeys(found)), ipv6_only=only_v6)
    addresses = await require_device(addresses, config.connect_timeout_s)
    timeouts: dict[str, Any] = {
        "ssl_handshake_timeout": ssl_handshake_timeout,
        "ssl_shutdown_timeout": ssl_shutdown_timeout,
    }
    server = RdmaServer(
        addresses, protocol_factory, backlog, config, ssl, timeouts, limits or DEFAULT_LIMITS
    )
    server._place = sock
    if start_serving:
        try:
            server._listen()
        except BaseException:
            server.close()
            raise
    return server


async def start_server(
    client_connected_cb: Callable[[RdmaStreamReader, RdmaStreamWriter], Awaitable[None] | None],
    host: str | Sequence[str] | None = None,
    port: int | str | None = None,
    *,
    limit: int = _LIMIT,
    **kwds: Any,
) -> RdmaServer:
    """Serve streams; `asyncio.start_server` over RDMA.

    Args:
        client_connected_cb: Called with a reader and a writer for each connection; a coroutine
            function becomes a task.
        host: Local name or address, or several; None for all.
        port: Its port; 0 or None lets the kernel choose.
        limit: Bytes that a reader keeps before the peer has to wait; see `asyncio.StreamReader`.
        kwds: As for `create_server`.

    Raises: as `create_server`.

    Cancellation: what was begun is undone.
    """
    loop = asyncio.get_running_loop()

    def connected(reader: Any, writer: Any) -> Any:
        # asyncio makes the writer itself; this one has the same attributes and one method more.
        writer.__class__ = RdmaStreamWriter
        fork.guard_public(writer)
        return client_connected_cb(reader, writer)

    def factory() -> asyncio.StreamReaderProtocol:
        reader = RdmaStreamReader(limit=limit, loop=loop)
        return asyncio.StreamReaderProtocol(reader, connected, loop=loop)

    return await create_server(factory, host, port, **kwds)
