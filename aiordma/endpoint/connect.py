"""connect(): from a name and a port to a Connection."""

from __future__ import annotations

import errno
import functools
import logging
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
from aiordma.endpoint.keys import REQUEST_SIZE, Ends, Pledge, plain_hello
from aiordma.endpoint.link import Link
from aiordma.endpoint.wire import HELLO_SIZE, Hello, protocol_error
from aiordma.errors import (
    AuthenticationError,
    ConnectionFailedError,
    ConnectionLostError,
    ConnectionRejectedError,
    ResourceClosedError,
)
from aiordma.link.dialing import dial, limit_of, way_to
from aiordma.link.pacing import Course
from aiordma.link.refusal import asks_again, concerns_keys, library_words, parse_refusal
from aiordma.loop.coroutines import show_frames
from aiordma.memory.shared import Memory, check_shared

__all__ = ["Opening", "connect"]

show_frames(
    Connection.send, Connection.recv, Connection.__anext__, Connection.request, Connection.recv_into
)

T = TypeVar("T")


class Opening(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine that can also be used with `async with`, which closes the opened object.

    Like every coroutine it can be awaited once, can be passed to `asyncio.create_task` and the
    like, and warns if it was never awaited.

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
            del error  # its traceback refers to this frame, which would make a cycle

    def close(self) -> None:
        """End the coroutine where it waits, or before it has begun.

        In the second case it warns, with a RuntimeWarning: the program probably mistook the
        coroutine for the object that it opens, and meant to close that.
        """
        unused = getcoroutinestate(self._coroutine) == CORO_CREATED
        self._coroutine.close()
        if unused:
            # Other uses before the await raise.  This cannot, because asyncio itself closes a
            # coroutine that it cannot run.
            warnings.warn(self._not_awaited("close()"), RuntimeWarning, stacklevel=2)

    if not TYPE_CHECKING:  # for type checkers there are no other attributes

        def __getattr__(self, name: str) -> Any:
            if name.startswith("cr_"):  # attributes of a coroutine, which asyncio shows of a task
                return getattr(self._coroutine, name)
            if name.startswith("_"):
                raise AttributeError(name)
            # The program has mistaken the coroutine for the object that it opens.
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
        self._coroutine.close()  # otherwise there is also a warning that it was never awaited
        msg = f"{call}() is used with `async with {call}(...)`, not with `with`"
        raise TypeError(msg)

    def __exit__(self, *exc_info: object) -> None:
        """Never called: there is no `with` block."""

    async def __aenter__(self) -> T:
        self._opened = await self._coroutine
        await self._opened.__aenter__()
        return self._opened  # type: ignore[no-any-return]

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        return await self._opened.__aexit__(*exc_info)  # type: ignore[no-any-return]


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
    """Connect to a listener; await the result, or use it with `async with`.

    If the name has several addresses, they are tried as in RFC 8305: IPv6 and IPv4 alternate, and
    each address has a head start before the next.

    Args:
        host: Name or address of the peer, IPv4 or IPv6 (link-local with its interface, as in
            `fe80::1%eth0`).  The routing table decides which RDMA device of this machine is used.
        port: The peer's port, 1 to 65535.
        config: Settings of the connection.
        memory: Registered memory that the connection shares with others, in one protection domain.
        private_data: Bytes for the listener's program, at most 36 (11 with `config.keys`, 56 with
            `config.raw`).
        local_addr: Local (address, port) to connect from; address "" and port 0 mean any.
        reuse_address: Whether to share the local address and port with other connections that also
            do so.
        happy_eyeballs_delay: Seconds of head start for an address before the next is tried in
            parallel; None to try one after the other.
        timeout: Seconds for the whole call; None for no limit.  Zero or less means that the
            deadline has already passed.  By default the limit is 10 seconds, not counting the time
            that the event loop is late, or that this connect waits for its turn because the loop
            has many connects to the same address.

    Raises:
        TypeError, ValueError: An argument is invalid; raised by the call, before it is awaited.
        ResourceClosedError, RuntimeError: The memory is closed, or is not open, or belongs to
            another event loop.
        LibraryMissingError, DeviceNotFoundError: RDMA is not available here, or the route to the
            peer leads over no RDMA device.
        socket.gaierror: The name does not resolve.
        ConnectionRejectedError: No program listens there, or the program has refused; what it sent
            is in `private_data`.  A listener that refuses because its backlog is full is tried
            again.
        AuthenticationError: The two sides have not proved to each other that they have the same
            key, see `config.keys`; also if one of them has keys, and the other has none.
        ConnectTimeoutError: There was no answer in time, or the listener's backlog stayed full.
        RdmaOSError: There is no route to the peer (ENETUNREACH), or the system is short of
            something.
        ConnectionFailedError: It failed for another reason; the text has a hint.

    If all addresses of a name have failed, the error is that of the attempt that came furthest.
    Its text lists all of them, and its `__cause__` is an `ExceptionGroup` of them.

    Cancellation: the connect is undone.
    """
    if config is None:
        config = DEFAULTS
    else:
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
    room -= 0 if config.keys is None else REQUEST_SIZE
    private_data = payload_of("private data", private_data, room)
    within = limit_of(timeout)

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
        if config.keys is not None:
            link.state.require_proof(None)  # before the first receive is posted
        connection = Connection(link, config)
        if link.log.tells(logging.DEBUG):
            link.note("connects to %s port %d by queue pair %d", *address, link.qp.num)
        data = private_data
        pledge: Pledge | None = None
        if not config.raw:
            data = link.common.hello(private_data, REQUEST_ROOM)
        if config.keys is not None:
            pledge = Pledge(config.keys, data)
            data = pledge.request
        offer = link.common.plan.offer(link.context.attributes)
        course.asked = True
        # No time limit here, as `dial` has one for the whole connect.
        event = await cm_id._connect(offer, data, None, link.qp.num)
        theirs = None
        if not config.raw:
            theirs = Hello.parse(plain_hello(event.private_data) if pledge else event.private_data)
            if theirs is None:
                text = "the listener does not speak aiordma's message protocol; use raw=True"
                raise protocol_error(text)
        if pledge is not None:
            peer, own = cm_id._ends()
            ends = Ends(own, peer, b"" if link.context.is_iwarp else cm_id.peer_gid)
            link.state.prove(pledge.check(event.private_data, ends))
            connection._facts["key_id"] = pledge.key_id
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
        if link is not None and link.failure is not None and _tells_of_the_adapter(exc):
            text = "the connection was lost before it was made"
            raise ConnectionLostError(errno.ECONNRESET, text) from link.failure
        if isinstance(exc, ConnectionRejectedError) and not isinstance(exc, AuthenticationError):
            if not config.raw:
                raise _readable(exc) from None
            if words := library_words(exc.private_data):
                exc.args = (exc.errno, f"connection refused by the listener: {words}")
                exc.strerror = exc.args[1]
                exc.hint = words
        raise
    return connection


def _tells_of_the_adapter(exc: BaseException) -> bool:
    """Whether `exc` may be the consequence of a failed adapter.

    After such a failure the connection id is closed, without the program having done so, or the
    queue pair cannot be moved to the next state.
    """
    return isinstance(exc, ResourceClosedError) or type(exc) is ConnectionFailedError


def _readable(exc: ConnectionRejectedError) -> ConnectionRejectedError:
    """The refusal, with what the program sent, or with the reason of the peer's library."""
    user_data, words = parse_refusal(exc.private_data)
    text = f"connection refused by the listener: {words}" if words else exc.args[1]
    kind, code = ConnectionRejectedError, exc.errno
    if concerns_keys(exc.private_data):
        kind, code = AuthenticationError, errno.EACCES
    readable = kind(code, text, event=exc.event, status=exc.status, private_data=user_data)
    readable.hint = words or exc.hint
    readable.try_again = asks_again(exc.private_data)
    return readable
