"""create_connection and open_connection: asyncio's, over RDMA."""

from __future__ import annotations

import asyncio
import socket
import ssl as ssl_module
from collections.abc import Callable
from types import EllipsisType
from typing import Any

from aiordma.arguments import check_kind, check_seconds
from aiordma.cm.address import Address, check_address, check_port
from aiordma.errors import ConnectionRejectedError
from aiordma.link.dialing import dial, limit_of, way_to
from aiordma.link.pacing import Course
from aiordma.link.refusal import asks_again, names_the_kind, parse_refusal
from aiordma.loop import fork
from aiordma.streams.stream_config import DEFAULTS, StreamConfig
from aiordma.streams.stream_port import StreamPort
from aiordma.streams.stream_reader import READER_LIMIT, RdmaStreamReader, RdmaStreamWriter
from aiordma.streams.tls import check_times, secured
from aiordma.streams.transport import RdmaTransport

__all__ = ["create_connection", "open_connection"]

_FAMILIES = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


async def create_connection(
    protocol_factory: Callable[[], Any],
    host: str | None = None,
    port: int | str | None = None,
    *,
    ssl: ssl_module.SSLContext | bool | None = None,
    family: int = 0,
    proto: int = 0,
    flags: int = 0,
    sock: None = None,
    local_addr: Address | None = None,
    server_hostname: str | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    happy_eyeballs_delay: float | None = None,
    interleave: int | None = None,
    config: StreamConfig | None = None,
    timeout: float | EllipsisType | None = ...,
) -> tuple[asyncio.Transport, Any]:
    """Connect to a stream server, as `loop.create_connection` does over TCP.

    The peer may be an aiordma server or any program that uses rsockets, such as one under
    `librspreload.so` (`rsocket(7)`).

    Args:
        protocol_factory: Makes the protocol, once the connection is established.
        host: Name or address of the peer; routing chooses the RDMA device.
        port: Its port, a number or the name of a service.
        ssl: A context, or True for `ssl.create_default_context()`, to speak TLS.
        family: `socket.AF_INET` or `AF_INET6` for that family alone; 0 for both.
        proto: 0 or `socket.IPPROTO_TCP`.
        flags: Ignored; asyncio's signature has it.
        sock: Has to be None: an RDMA connection has no socket.
        local_addr: Local (address, port) to connect from.
        server_hostname: The name that the server's certificate has to have; `host` by default.
        ssl_handshake_timeout: Seconds for the TLS handshake, 60 by default.
        ssl_shutdown_timeout: Seconds for the end of TLS, 30 by default.
        happy_eyeballs_delay: Seconds of head start for each of several addresses; None to try one
            after the other.
        interleave: Ignored: the address families always alternate.
        config: Settings.
        timeout: Seconds by the clock until the connection is established, without TLS; None for no
            limit of its own.  The default is 10 seconds, not counting the time for which the loop
            is late, or the connect waits for its turn among many to the same address.  Zero or less
            means that the deadline has already passed.

    Returns:
        (transport, protocol); the transport is an `RdmaTransport`, with TLS asyncio's own over one.

    Raises:
        TypeError, ValueError: An argument is invalid.
        LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or not on the way.
        socket.gaierror: The name does not resolve.
        ConnectionRejectedError: No program listens there, or it speaks another protocol.  An
            aiordma server that refuses because too many clients wait is tried again.
        ConnectTimeoutError: There was no answer in time, or too many clients waited all the time.
        ProtocolError: The answer makes no sense.
        ssl.SSLError: The TLS handshake failed.

    Cancellation: the resources are closed.
    """
    if sock is not None:
        msg = "a socket cannot be used for RDMA: give host and port"
        raise ValueError(msg)
    if not isinstance(host, str) or port is None:
        msg = "host and port have to be given"
        raise ValueError(msg)
    if proto not in (0, socket.IPPROTO_TCP):
        msg = f"proto {proto} is not a stream's"
        raise ValueError(msg)
    if family not in (0, *_FAMILIES):
        msg = f"family {family} is neither AF_INET nor AF_INET6"
        raise ValueError(msg)
    if server_hostname is not None and not ssl:
        msg = "server_hostname is only meaningful with ssl"
        raise ValueError(msg)
    if server_hostname is None and ssl:
        if not host:
            msg = "You must set server_hostname when using ssl without a host"
            raise ValueError(msg)
        server_hostname = host
    if not host:
        msg = "host is empty: give the name or the address of the peer"
        raise ValueError(msg)
    times = {
        "ssl_handshake_timeout": ssl_handshake_timeout,
        "ssl_shutdown_timeout": ssl_shutdown_timeout,
    }
    check_times(ssl, times)
    check_seconds("happy_eyeballs_delay", happy_eyeballs_delay, zero=True)
    check_kind("config", config, StreamConfig)
    number = socket.getservbyname(port, "tcp") if isinstance(port, str) else port
    check_port(number, lowest=1)
    if local_addr is not None:
        check_address(local_addr)
    elif family:
        local_addr = (_FAMILIES[socket.AddressFamily(family)], 0)
    config = config or DEFAULTS
    within = limit_of(timeout)

    async def attempt(address: Address, origin: Address | None, course: Course) -> RdmaTransport:
        return await _connect(address, origin, config, course)

    transport = await dial(
        host,
        number,
        attempt,
        local_addr=local_addr,
        delay=happy_eyeballs_delay,
        limit=within,
        discard=RdmaTransport._discard,
    )
    try:
        protocol = protocol_factory()
        if ssl is None or ssl is False:
            started = transport._loop.create_future()
            transport._start(protocol, started)
            await started
            return transport, protocol
        context = ssl_module.create_default_context() if ssl is True else ssl
        wrapped = await secured(
            transport, protocol, context, times, server_hostname=server_hostname
        )
    except BaseException:
        if transport._protocol is None:
            transport._discard()
        else:
            transport.close()
        raise
    return wrapped, protocol


async def _connect(
    address: Address,
    origin: Address | None,
    config: StreamConfig,
    course: Course,
) -> RdmaTransport:
    """A transport whose handshake is done, and which has not begun."""
    cm_id, release = await way_to(address, origin, tos=config.tos, limit=course.limit.seconds)
    undo: list[Callable[[], object]] = [cm_id.close, release]
    port: StreamPort | None = None
    try:
        port = await StreamPort.open(cm_id, config)
        port.at_close(release)
        undo = [port.close]
        transport = RdmaTransport(port, config)
        undo = [transport._discard]
        # iWARP's connection manager wants a read promised.
        parameter = port.plan.parameter(int(port.context.is_iwarp))
        port.note("connects to %s port %d by queue pair %d", *address, port.qp.num)
        course.asked = True
        # `dial` has a limit for all of it.
        event = await cm_id.connect(parameter, private_data=transport._hello(), timeout=None)
        transport._meet(event)
    except BaseException as exc:
        if port is not None:
            port.note("is not made: %r", exc)
        for function in undo:
            function()
        if isinstance(exc, ConnectionRejectedError):
            _explain(exc)
        raise
    return transport


def _explain(exc: ConnectionRejectedError) -> None:
    """Add the reason of an aiordma server that has refused."""
    _, words = parse_refusal(exc.private_data)
    if names_the_kind(exc.private_data):
        words = (
            "it is a listener for messages, and this is a client of streams: connect with "
            "aiordma.connect, or serve with aiordma.start_server or create_server there"
        )
    if words:
        exc.args = (exc.errno, f"connection refused by the server: {words}")
        exc.strerror = exc.args[1]
        exc.hint = words
        exc.try_again = asks_again(exc.private_data)


async def open_connection(
    host: str | None = None,
    port: int | str | None = None,
    *,
    limit: int = READER_LIMIT,
    **kwds: Any,
) -> tuple[RdmaStreamReader, RdmaStreamWriter]:
    """Connect to a stream server, as `asyncio.open_connection` does over TCP.

    Args:
        host: Name or address of the peer.
        port: Its port.
        limit: Bytes that the reader keeps before the peer has to wait; see `asyncio.StreamReader`.
        kwds: As for `create_connection`.

    Returns:
        A reader, which has `readinto` in addition to asyncio's methods, and a writer.

    Raises: as `create_connection`.

    Cancellation: the resources are closed.
    """
    loop = asyncio.get_running_loop()
    reader = RdmaStreamReader(limit=limit, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await create_connection(lambda: protocol, host, port, **kwds)
    writer = RdmaStreamWriter(transport, protocol, reader, loop)
    fork.guard_public(writer)
    return reader, writer
