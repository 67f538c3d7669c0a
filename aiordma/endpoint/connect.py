"""connect(): from a name and a port to a Connection."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Generator
from types import EllipsisType
from typing import Any, Generic, TypeVar

from aiordma.cm.address import Address, check_address, check_port, look_up
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.connection_parameter import ConnectionParameter
from aiordma.cm.enums import Option
from aiordma.cm.event_channel import EventChannel
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.eyeballs import AllFailedError, interleave, race
from aiordma.endpoint.link import Link
from aiordma.endpoint.wire import HELLO_SIZE, Hello, parse_refusal
from aiordma.errors import (
    AddressError,
    ConnectionRejectedError,
    ConnectTimeoutError,
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


def hello_of(config: ConnectionConfig, private_data: bytes, window: int | None = None) -> Hello:
    """This side's half of the handshake; `window` is what the peer may send at first."""
    return Hello(
        recv_depth=config.recv_depth if window is None else window,
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
    reuse_address: bool = False,
    happy_eyeballs_delay: float | None = 0.25,
    timeout: float | EllipsisType | None = ...,
) -> Opening[Connection]:
    """Connect to a listener; the result is awaited, or used with `async with`.

    A name with several addresses is tried as RFC 8305 says: IPv6 and IPv4 by turns, each with a
    head start before the next.

    Args:
        host: Name or address of the peer, IPv4 or IPv6 (link-local with its interface, as in
            `fe80::1%eth0`); which of this machine's RDMA devices leads there is found by routing.
        port: Its port, 1 to 65535.
        config: Settings.
        private_data: Bytes for the listener's program, at most 36 (56 with `config.raw`).
        local_addr: Local (address, port) to connect from; port 0 for any, address "" for any.
        reuse_address: Share the local address and port with other connections that do so, too.
        happy_eyeballs_delay: Seconds of head start for an address before the next is tried beside
            it; None to try one after the other.
        timeout: Seconds for all of it; `config.connect_timeout_s` by default, None for no limit
            of its own.

    Raises:
        TypeError, ValueError: An argument is of no use, at the call.
        LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or not on the way
            to the peer.
        socket.gaierror: The name does not resolve.
        ConnectionRejectedError: Nobody listens there, or the program refused; its bytes are in
            `private_data`.
        ConnectTimeoutError: No answer in time.
        ConnectionFailedError: Another reason; the text has a hint.

        Of a name with several addresses that all failed: an error of the kind of the one that came
        furthest, with all of them in its text and in the `ExceptionGroup` that is its `__cause__`.

    Cancellation: what was begun is undone.
    """
    config = config or ConnectionConfig()
    private_data = bytes(private_data)
    if not isinstance(host, str):
        msg = f"a host is a str, not {host!r}"
        raise TypeError(msg)
    check_port(port, lowest=1)
    if local_addr is not None:
        check_address(local_addr)
    if happy_eyeballs_delay is not None and not happy_eyeballs_delay >= 0:
        msg = f"happy_eyeballs_delay {happy_eyeballs_delay} is negative"
        raise ValueError(msg)
    room = _REQUEST_ROOM - (0 if config.raw else HELLO_SIZE)
    if len(private_data) > room:
        msg = f"private data of {len(private_data)} bytes does not fit: {room} are left"
        raise ValueError(msg)
    limit = config.connect_timeout_s if timeout is ... else timeout
    if limit is not None and not limit > 0:
        msg = f"timeout {limit} is not positive"
        raise ValueError(msg)

    def give_up(connection: Connection) -> None:
        connection.abort()

    async def open_() -> Connection:
        async def attempt(address: Address) -> Connection:
            origin = origins[address]
            return await _one(address, config, private_data, origin, reuse_address, limit)

        begun = asyncio.timeout(limit)
        try:
            async with begun:
                await warm_up()
                origins = await _ways(host, port, local_addr)
                addresses = interleave(list(origins))
                if len(addresses) == 1:
                    return await attempt(addresses[0])
                return await race(addresses, attempt, happy_eyeballs_delay, give_up)
        except AllFailedError as exc:
            one = exc.as_one(host)
            raise one from one.__cause__
        except TimeoutError as exc:
            if not begun.expired() or isinstance(exc, ConnectTimeoutError):
                raise
            text = (
                f"no connection to {host} port {port} within {limit} s (is the peer up, is "
                "the address right, is UDP port 4791 (RoCE) open?)"
            )
            raise ConnectTimeoutError(errno.ETIMEDOUT, text) from exc

    return Opening(open_)


async def _ways(host: str, port: int, local_addr: Address | None) -> dict[Address, Address | None]:
    """The peer's addresses, each with the local one to connect from."""
    targets = await look_up(host, port)
    if local_addr is None:
        return dict.fromkeys(targets)
    local_host, local_port = local_addr
    if local_host:
        origins = await look_up(local_host, local_port)
    else:
        origins = [("0.0.0.0", local_port), ("::", local_port)]
    by_family = {_is_v6(origin): origin for origin in reversed(origins)}
    ways = {target: by_family[_is_v6(target)] for target in targets if _is_v6(target) in by_family}
    if not ways:
        text = f"no address of {host} has the family of the local address {local_host}"
        raise AddressError(errno.EAFNOSUPPORT, text)
    return dict(ways)


def _is_v6(address: Address) -> bool:
    return ":" in address[0]


async def _one(
    address: Address,
    config: ConnectionConfig,
    private_data: bytes,
    local_addr: Address | None,
    reuse_address: bool,
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
        if reuse_address:
            cm_id.set_option(Option.ID_REUSEADDR, 1)
        if config.tos is not None:
            cm_id.set_option(Option.ID_TOS, config.tos)
        await cm_id.resolve_addr(address, local_addr, timeout=step)
        await cm_id.resolve_route(timeout=step)
        link = await Link.open(cm_id, config)
        link.at_close(release)
        connection = Connection(link, config)
        hello = None if config.raw else hello_of(config, private_data, connection._window)
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
