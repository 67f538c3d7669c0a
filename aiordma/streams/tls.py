"""TLS over an RdmaTransport: asyncio's own, on any loop.

uvloop's `start_tls` takes only its own transports.  So asyncio's `SSLProtocol`, which needs nothing
but a loop with timers, is put in between here.
"""

from __future__ import annotations

import asyncio
import errno
import ssl as ssl_module
from asyncio import sslproto
from typing import Any, cast

from aiordma.errors import ConnectionLostError
from aiordma.streams.transport import RdmaTransport

__all__ = ["check_times", "secured", "start_tls"]

# Typeshed describes it as it was in Python 3.10.
_SSLProtocol = cast("Any", sslproto.SSLProtocol)


def check_times(ssl: object, times: dict[str, float | None]) -> None:
    """Raise if a time limit of TLS is given for a connection without TLS.

    Raises:
        ValueError: A limit is given.
    """
    for name, seconds in times.items():
        if seconds is not None and not ssl:
            msg = f"{name} is only meaningful with ssl"
            raise ValueError(msg)


async def secured(
    transport: RdmaTransport,
    protocol: Any,
    context: ssl_module.SSLContext,
    times: dict[str, float | None],
    *,
    server: Any = None,
    server_hostname: str | None = None,
) -> asyncio.Transport:
    """Begin a transport with TLS from its first byte; return the transport for the program.

    Raises:
        ssl.SSLError, OSError: The handshake failed; the transport closes.

    Cancellation: likewise.
    """
    waiter = transport._loop.create_future()
    ssl_protocol = _SSLProtocol(
        transport._loop, protocol, context, waiter, server is not None, server_hostname, **times
    )
    transport._start(ssl_protocol, None, server)
    wrapped: asyncio.Transport = ssl_protocol._get_app_transport()
    try:
        await _handshake(waiter, ssl_protocol)
    except BaseException:
        wrapped.close()
        raise
    finally:
        del waiter  # its exception has this frame: a cycle
    return wrapped


async def _handshake(waiter: asyncio.Future[None], ssl_protocol: Any) -> None:
    try:
        await waiter
    finally:
        del waiter  # its exception has this frame: a cycle
    # A handshake is over when there is a cipher, and not before.  The protocol is asked, which has
    # it for as long as it lives.
    if ssl_protocol._get_extra_info("cipher") is None:
        text = "the connection ended in the middle of the TLS handshake"
        raise ConnectionLostError(errno.ECONNABORTED, text)


async def start_tls(
    transport: asyncio.Transport,
    protocol: asyncio.BaseProtocol,
    sslcontext: ssl_module.SSLContext,
    *,
    server_side: bool = False,
    server_hostname: str | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
) -> asyncio.Transport:
    """Switch an open connection to TLS, as `loop.start_tls` does, on any loop.

    Args:
        transport: From `create_connection` or a server; its protocol must not use it any more.
        protocol: For the new transport; `connection_made` is not called again.
        sslcontext: An `ssl.SSLContext`.
        server_side: Whether this is the server.
        server_hostname: The name that the server's certificate has to have.
        ssl_handshake_timeout: Seconds, 60 by default.
        ssl_shutdown_timeout: Seconds, 30 by default.

    Returns:
        The transport to use from now on.

    Raises:
        TypeError: Not an `SSLContext`, or not a transport that TLS can use.
        ssl.SSLError, OSError: The handshake failed, or the server had no place for it in time
            (docs/limits.md); the connection is closed.

    Cancellation: the connection is closed.
    """
    if not isinstance(sslcontext, ssl_module.SSLContext):
        msg = f"sslcontext is expected to be an instance of ssl.SSLContext, got {sslcontext!r}"
        raise TypeError(msg)
    if not getattr(transport, "_start_tls_compatible", False):
        msg = f"transport {transport!r} is not supported by start_tls()"
        raise TypeError(msg)
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    ssl_protocol = _SSLProtocol(
        loop, protocol, sslcontext, waiter, server_side, server_hostname,
        ssl_handshake_timeout=ssl_handshake_timeout, ssl_shutdown_timeout=ssl_shutdown_timeout,
        call_connection_made=False,
    )  # fmt: skip
    # Made now: after a connection that ends at once it could not be.
    wrapped: asyncio.Transport = ssl_protocol._get_app_transport()
    # Not a byte may come between the old protocol and the new one.
    transport.pause_reading()
    transport.set_protocol(ssl_protocol)
    server = getattr(transport, "_server", None) if server_side else None
    begun: list[asyncio.Handle] = []
    place = None
    try:
        if server is not None:
            place = await server._tls_begins(transport)
        begun.append(loop.call_soon(ssl_protocol.connection_made, transport))
        begun.append(loop.call_soon(transport.resume_reading))
        await _handshake(waiter, ssl_protocol)
    except BaseException:
        transport.close()
        for call in begun:
            call.cancel()
        if not waiter.cancel() and not waiter.cancelled():
            waiter.exception()  # of a connection that was lost before its turn
        raise
    finally:
        if place is not None:
            place.leave()
        del waiter  # its exception has this frame: a cycle
    return wrapped
