"""connect(): from a name and a port to a Connection."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Generator
from types import EllipsisType
from typing import Any, Generic, TypeVar

from aiordma.cm.address import Address, look_up
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.connection_parameter import ConnectionParameter
from aiordma.cm.event_channel import EventChannel
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.link import Link
from aiordma.endpoint.wire import HELLO_SIZE, Hello, parse_refusal
from aiordma.errors import (
    ConnectionRejectedError,
    ConnectTimeoutError,
    DeviceNotFoundError,
    ProtocolError,
)
from aiordma.loop import registry
from aiordma.loop.workers import call_blocking

__all__ = ["Opening", "connect", "connection_parameter", "hello_of", "shared_channel", "warm_up"]

T = TypeVar("T")
_REQUEST_ROOM = 56  # private data of a connection request on InfiniBand and RoCE
_warm = False


class Opening(Generic[T]):
    """Something that is awaited, or used with `async with`, which also closes it."""

    def __init__(self, open_: Callable[[], Awaitable[T]]) -> None:
        self._open = open_
        self._opened: Any = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._open().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._open()
        await self._opened.__aenter__()
        return self._opened  # type: ignore[no-any-return]

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._opened.__aexit__(*exc_info)


async def warm_up() -> None:
    """Load the libraries and have them scan the devices, off the loop: that takes a while.

    Raises:
        LibraryMissingError: rdma-core is not installed.
        DeviceNotFoundError: The machine has no RDMA device.
    """
    global _warm
    if not _warm:
        channel = await call_blocking(EventChannel, undo=EventChannel.close)
        channel.close()
        _warm = True


def shared_channel() -> tuple[EventChannel, Callable[[], None]]:
    """The event channel that all connections of the running loop share, and its release."""
    return registry.acquire("connection events", EventChannel)


def connection_parameter(config: ConnectionConfig) -> ConnectionParameter:
    """Depths and retries as the configuration says, 0 included."""
    return ConnectionParameter.exact(
        responder_resources=config.responder_resources,
        initiator_depth=config.initiator_depth,
        retry_count=config.retry_count,
        rnr_retry_count=config.rnr_retry_count,
    )


def hello_of(config: ConnectionConfig, private_data: bytes) -> Hello:
    """This side's half of the handshake."""
    return Hello(
        recv_depth=config.recv_depth,
        rendezvous_window=config.rendezvous_window,
        slot_size=config.slot_size,
        max_message_kib=config.max_message_size // 1024,
        user_data=private_data,
    )


def connect(
    host: str,
    port: int,
    *,
    config: ConnectionConfig | None = None,
    private_data: bytes = b"",
    local_addr: Address | None = None,
    timeout: float | EllipsisType | None = ...,
) -> Opening[Connection]:
    """Connect to a listener; the result is awaited, or used with `async with`.

    Args:
        host: Name or address of the peer; which of this machine's RDMA devices leads there is
            found by routing.
        port: Its port, 1 to 65535.
        config: Settings.
        private_data: Bytes for the listener's program, at most 36 (56 with `config.raw`).
        local_addr: Local (address, port) to connect from.
        timeout: Seconds for all of it; `config.connect_timeout_s` by default, None for no limit
            of its own.

    Raises:
        ValueError: Port or private data out of range, at the call.
        LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or not on the way
            to the peer.
        socket.gaierror: The name does not resolve.
        ConnectionRejectedError: Nobody listens there, or the program refused; its bytes are in
            `private_data`.
        ConnectTimeoutError: No answer in time.
        ConnectionFailedError: Another reason; the text has a hint.

    Cancellation: what was begun is undone.
    """
    config = config or ConnectionConfig()
    private_data = bytes(private_data)
    if not isinstance(host, str):
        msg = f"a host is a str, not {host!r}"
        raise TypeError(msg)
    if not isinstance(port, int) or isinstance(port, bool):
        msg = f"a port is an int, not {port!r}"
        raise TypeError(msg)
    if not 0 < port <= 0xFFFF:
        msg = f"port {port} is not in 1..65535"
        raise ValueError(msg)
    room = _REQUEST_ROOM - (0 if config.raw else HELLO_SIZE)
    if len(private_data) > room:
        msg = f"private data of {len(private_data)} bytes does not fit: {room} are left"
        raise ValueError(msg)
    limit = config.connect_timeout_s if timeout is ... else timeout
    if limit is not None and not limit > 0:
        msg = f"timeout {limit} is not positive"
        raise ValueError(msg)

    async def open_() -> Connection:
        begun = asyncio.timeout(limit)
        try:
            async with begun:
                await warm_up()
                addresses = await look_up(host, port)
                return await _first(addresses, config, private_data, local_addr, limit)
        except TimeoutError as exc:
            if not begun.expired() or isinstance(exc, ConnectTimeoutError):
                raise
            text = (
                f"no connection to {host} port {port} within {limit} s (is the peer up, is "
                "the address right, is UDP port 4791 (RoCE) open?)"
            )
            raise ConnectTimeoutError(errno.ETIMEDOUT, text) from exc

    return Opening(open_)


async def _first(
    addresses: list[Address],
    config: ConnectionConfig,
    private_data: bytes,
    local_addr: Address | None,
    limit: float | None,
) -> Connection:
    """The first address that works; the error of the last if none does."""
    for last, address in enumerate(addresses, 1 - len(addresses)):
        try:
            return await _one(address, config, private_data, local_addr, limit)
        except OSError:
            if last == 0:
                raise
    msg = "the name has no address"
    raise DeviceNotFoundError(errno.ENODEV, msg)


async def _one(
    address: Address,
    config: ConnectionConfig,
    private_data: bytes,
    local_addr: Address | None,
    limit: float | None,
) -> Connection:
    channel, release = shared_channel()
    try:
        cm_id = ConnectionId(channel)
    except BaseException:
        release()
        raise
    link: Link | None = None
    connection: Connection | None = None
    step = limit or 60.0
    try:
        await cm_id.resolve_addr(address, local_addr, timeout=step)
        await cm_id.resolve_route(timeout=step)
        link = await Link.open(cm_id, config)
        link.at_close(release)
        connection = Connection(link, config)
        hello = None if config.raw else hello_of(config, private_data)
        data = private_data if hello is None else hello.pack(_REQUEST_ROOM)
        parameter = connection_parameter(config)
        event = await cm_id.connect(parameter, private_data=data, timeout=limit)
        theirs = None
        if hello is not None:
            theirs = Hello.parse(event.private_data)
            if theirs is None:
                text = "the listener does not speak aiordma's message protocol; use raw=True"
                raise ProtocolError(errno.EPROTO, text)
        connection._meet(theirs, event.initiator_depth)
        if theirs is None:
            connection.private_data = event.private_data
        else:
            connection._greet()
    except BaseException as exc:
        if connection is not None:
            connection.abort()
        else:
            if link is not None:
                link.close()
            cm_id.close()
            release()
        if isinstance(exc, ConnectionRejectedError) and not config.raw:
            raise _readable(exc) from None
        raise
    return connection


def _readable(exc: ConnectionRejectedError) -> ConnectionRejectedError:
    """The refusal with the program's own bytes, or with the reason of the peer's library."""
    user_data, words = parse_refusal(exc.private_data)
    text = f"connection refused by the listener: {words}" if words else exc.args[1]
    readable = ConnectionRejectedError(
        exc.errno, text, event=exc.event, status=exc.status, private_data=user_data
    )
    readable.hint = words or exc.hint
    return readable
