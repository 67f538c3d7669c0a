"""connect(): from a name and a port to a Connection."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Coroutine, Generator
from inspect import CORO_CREATED, getcoroutinestate
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from aiordma.arguments import check_kind, check_seconds, payload_of
from aiordma.cm.address import Address, check_address, check_port
from aiordma.cm.connection_id import REQUEST_ROOM
from aiordma.endpoint.config import DEFAULTS, ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.link import Link
from aiordma.endpoint.wire import HELLO_SIZE, Hello, protocol_error
from aiordma.errors import ConnectionRejectedError
from aiordma.link.dialing import dial, limit_of, way_to
from aiordma.link.pacing import Course
from aiordma.link.refusal import asks_again, library_words, parse_refusal
from aiordma.loop.coroutines import show_frames
from aiordma.memory.shared import Memory, check_shared

__all__ = ["Opening", "connect"]

show_frames(Connection.send, Connection.recv, Connection.__anext__)

T = TypeVar("T")


class Opening(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine that can also be used with `async with`, which closes the opened object.

    As every coroutine it is awaited once, is taken by `asyncio.create_task` and the like, and
    warns if it is forgotten.

    Args:
        coroutine: Opens the object.
        name: The call that the program made.
    """

    __slots__ = ("_coroutine", "_opened")

    def __init__(self, coroutine: Coroutine[Any, Any, T], name: str) -> None:
        renamed: Any = coroutine
        renamed.__name__ = renamed.__qualname__ = name
        self._coroutine: Any = coroutine
        self._opened: Any = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._coroutine.__await__()  # type: ignore[no-any-return]

    def send(self, value: Any) -> Any:
        """Resume the coroutine."""
        if value is not None and getcoroutinestate(self._coroutine) == CORO_CREATED:
            raise TypeError(self._not_awaited("send()"))
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception where the coroutine waits."""
        try:
            return self._coroutine.throw(*error)
        finally:
            del error  # its traceback has this frame: a cycle

    def close(self) -> None:
        """End the coroutine where it waits, or before it begins.

        Before it begins this is a RuntimeWarning: the program has taken the coroutine for the
        object, and meant to close that.
        """
        unused = getcoroutinestate(self._coroutine) == CORO_CREATED
        self._coroutine.close()
        if unused:
            # No exception, as for other early uses: asyncio closes a coroutine that it cannot run.
            warnings.warn(self._not_awaited("close()"), RuntimeWarning, stacklevel=2)

    if not TYPE_CHECKING:  # for type checkers there are no other attributes

        def __getattr__(self, name: str) -> Any:
            if name.startswith("cr_"):  # attributes of a coroutine, which asyncio shows of a task
                return getattr(self._coroutine, name)
            if name.startswith("_"):
                raise AttributeError(name)
            # The program has taken the coroutine for the object.
            raise AttributeError(self._not_awaited(name), name=name, obj=self)

    def _not_awaited(self, what: str) -> str:
        call = self._coroutine.__name__
        return (
            f"{call}() has to be awaited before {what} of its result can be used: write "
            f"`await {call}(...)` or `async with {call}(...)`"
        )

    @property
    def __name__(self) -> str:
        return self._coroutine.__name__  # type: ignore[no-any-return]

    def __enter__(self) -> NoReturn:
        call = self._coroutine.__name__
        self._coroutine.close()  # not to be told that it was never awaited as well
        msg = f"{call}() is used with `async with {call}(...)`, not with `with`"
        raise TypeError(msg)

    def __exit__(self, *exc_info: object) -> None:
        """Never called: there is no `with` block."""

    async def __aenter__(self) -> T:
        self._opened = await self._coroutine
        await self._opened.__aenter__()
        return self._opened  # type: ignore[no-any-return]

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._opened.__aexit__(*exc_info)


def connect(
    host: str,
    port: int,
    *,
    config: ConnectionConfig | None = None,
    memory: Memory | None = None,
    private_data: bytes = b"",
    local_addr: Address | None = None,
    reuse_address: bool = False,
    happy_eyeballs_delay: float | None = 0.25,
    timeout: float | EllipsisType | None = ...,
) -> Opening[Connection]:
    """Connect to a listener; the result is awaited, or used with `async with`.

    A name with several addresses is tried as RFC 8305 says: IPv6 and IPv4 alternate, and each
    address has a head start before the next.

    Args:
        host: Name or address of the peer, IPv4 or IPv6 (link-local with its interface, as in
            `fe80::1%eth0`); which of this machine's RDMA devices leads there is found by routing.
        port: Its port, 1 to 65535.
        config: Settings.
        memory: Registered memory that the connection shares with others, in one protection domain.
        private_data: Bytes for the listener's program, at most 36 (56 with `config.raw`).
        local_addr: Local (address, port) to connect from; port 0 for any, address "" for any.
        reuse_address: Share the local address and port with other connections that do so, too.
        happy_eyeballs_delay: Seconds of head start for an address before the next is tried beside
            it; None to try one after the other.
        timeout: Seconds for all of it, by the clock; None for no limit of its own.  By default
            `config.connect_timeout_s`, in which no time counts that the connect waits for its turn,
            as many connects of a loop to one address do, or that the loop is late.  Zero or less
            means that the deadline has already passed.

    Raises:
        TypeError, ValueError: An argument is invalid; raised by the call, before it is awaited.
        ResourceClosedError, RuntimeError: The memory is closed, or not open, at the call; or it
            belongs to another event loop.
        LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or not on the way
            to the peer.
        HostNotFoundError: The name does not resolve.
        ConnectionRejectedError: No program listens there, or the program refused; its bytes are in
            `private_data`.  A listener that refuses because too many wait is tried again.
        ConnectTimeoutError: No answer in time, or no room at a listener where too many wait.
        RdmaOSError: The system knows no way there (ENETUNREACH), or is short of something.
        ConnectionFailedError: Another reason; the text has a hint.

    Where a name has several addresses and all failed, the error is of the kind of the attempt that
    came furthest, with all of them in its text and in the `ExceptionGroup` that is its `__cause__`.

    Cancellation: the connect is undone.
    """
    if config is None:
        config = DEFAULTS
    check_kind("config", config, ConnectionConfig)
    check_shared(memory)
    check_kind("host", host, str, none=False)
    if not host:
        msg = "host is empty: give the name or the address of the peer"
        raise ValueError(msg)
    check_port(port, lowest=1)
    if local_addr is not None:
        check_address(local_addr)
    check_seconds("happy_eyeballs_delay", happy_eyeballs_delay, zero=True)
    room = REQUEST_ROOM - (0 if config.raw else HELLO_SIZE)
    private_data = payload_of("private data", private_data, room)
    within = limit_of(timeout, config.connect_timeout_s)

    attempt = functools.partial(_one, config, memory, private_data, reuse_address)
    opening = dial(
        host,
        port,
        attempt,
        local_addr=local_addr,
        delay=happy_eyeballs_delay,
        limit=within,
        discard=Connection.abort,
    )
    return Opening(opening, "connect")


async def _one(
    config: ConnectionConfig,
    memory: Memory | None,
    private_data: bytes,
    reuse_address: bool,
    address: Address,
    local_addr: Address | None,
    course: Course,
) -> Connection:
    cm_id, release = await way_to(
        address,
        local_addr,
        reuse_address=reuse_address,
        tos=config.tos,
        limit=course.limit.seconds,
    )
    link: Link | None = None
    connection: Connection | None = None
    try:
        link = await Link.open(cm_id, config, memory)
        link.at_close(release)
        connection = Connection(link, config)
        link.note("connects to %s port %d by queue pair %d", *address, link.qp.num)
        data = private_data
        if not config.raw:
            data = connection._hello(private_data, REQUEST_ROOM)
        offer = link.plan.offer(link.context.attributes)
        course.asked = True
        # `dial` has a limit for all of it.
        event = await cm_id._connect(offer, data, None, link.qp.num)
        theirs = None
        if not config.raw:
            theirs = Hello.parse(event.private_data)
            if theirs is None:
                text = "the listener does not speak aiordma's message protocol; use raw=True"
                raise protocol_error(text)
        connection._meet(theirs, event.initiator_depth, address)
        if theirs is None:
            connection.private_data = event.private_data
            connection._watch()
        else:
            connection._greet()
        connection._opened(event.qp_num)
    except BaseException as exc:
        if link is not None and (connection is None or not connection.is_closing()):
            link.note("is not made: %r", exc)
        if connection is not None:
            connection.abort()
        elif link is not None:
            link.close()
        else:
            cm_id.close()
            release()
        if isinstance(exc, ConnectionRejectedError):
            if not config.raw:
                raise _readable(exc) from None
            if words := library_words(exc.private_data):
                exc.args = (exc.errno, f"connection refused by the listener: {words}")
                exc.strerror = exc.args[1]
                exc.hint = words
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
    readable.try_again = asks_again(exc.private_data)
    return readable
