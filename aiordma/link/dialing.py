"""Dialing: from a name and a port to a connection id that has its device and its route.

Messages and streams connect alike: the name is looked up, its addresses are tried with a head start
each, and all of it has one deadline.  They differ in the `attempt` that makes a connection on the
connection id.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Coroutine, Mapping
from types import EllipsisType
from typing import TypeVar

from aiordma.arguments import seconds_left
from aiordma.cm.address import Address, look_up
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.enums import Option
from aiordma.cm.event_channel import EventChannel
from aiordma.errors import ConnectionFailedError, ConnectTimeoutError, prefix_address
from aiordma.link.eyeballs import AllFailedError, interleave, race
from aiordma.link.pacing import Course, paced
from aiordma.link.tally import Operation
from aiordma.loop import background, registry
from aiordma.loop.limit import Limit
from aiordma.loop.workers import call_blocking

__all__ = ["CONNECT_TIMEOUT_S", "dial", "limit_of", "shared_channel", "warm_up", "way_to"]

T = TypeVar("T")
#: Seconds in which a connection is made, names and all addresses included, unless the program has
#: a limit of its own.
CONNECT_TIMEOUT_S = 10.0
_STEP_S = 60.0  # for each step, where the program has set no limit
# Local ports that a connect from any port tries.
_PORTS = 16
_warm = False


async def warm_up() -> None:
    """Load the libraries and have them scan the devices, in a thread: that takes a while.

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
    """Return the event channel that all connections of the running loop share, and its release."""
    return registry.acquire("connection events", _new_channel)


def _new_channel() -> EventChannel:
    background.prepare()
    return EventChannel()


def limit_of(timeout: float | EllipsisType | None) -> Limit:
    """Return the limit of a connect.

    A `timeout` of the program is kept exactly.  The default limit does not count the time for which
    the program itself holds up the loop.

    Args:
        timeout: Seconds, None for no limit, or ... for `CONNECT_TIMEOUT_S`.

    Raises:
        TypeError, ValueError: `timeout` is no time.
    """
    if timeout is ...:
        return Limit(CONNECT_TIMEOUT_S, patient=True)
    return Limit(None if timeout is None else seconds_left("timeout", timeout))


async def dial(
    host: str,
    port: int,
    attempt: Callable[[Address, Address | None, Course], Coroutine[object, object, T]],
    *,
    local_addr: Address | None,
    delay: float | None,
    limit: Limit,
    discard: Callable[[T], object],
) -> T:
    """Return the first connection that `attempt` makes to an address of `host`.

    Args:
        host: Name or address.
        port: Its port.
        attempt: Connects to an address, from a local address or from any (None), and sets
            `Course.asked` when the request goes out; closes its resources if it fails or is
            canceled.
        local_addr: Local (address, port) to connect from; "" and 0 for any.
        delay: Seconds of head start for an address; None for one attempt at a time.
        limit: Limit of the whole, from `limit_of`.
        discard: Called with a connection that comes too late.

    Raises:
        ConnectTimeoutError: Not within `limit`.
        OSError: Each attempt failed; see `AllFailedError.as_one`.

    Cancellation: attempts under way are canceled, and have closed their resources.
    """
    course = Course(limit)
    with Operation("connect", {"server.address": host, "server.port": port}):
        try:
            with limit:
                if not _warm:
                    await warm_up()
                course.ready = True
                origins = await _ways(host, port, local_addr)
                if len(origins) == 1:
                    try:
                        return await _attempt(attempt, origins, course, *origins)
                    except OSError as exc:
                        prefix_address(exc, host, port)
                        raise
                one = functools.partial(_attempt, attempt, origins, course)
                return await race(interleave(list(origins)), one, delay, discard)
        except AllFailedError as exc:
            error = exc.as_one(host, port)
            try:
                raise error from error.__cause__
            finally:
                del error  # its traceback has this frame: a cycle
        except TimeoutError as exc:
            if not limit.expired or isinstance(exc, ConnectTimeoutError):
                raise
            text = f"no connection to {host} port {port} within {limit.seconds} s"
            raise _too_late(text, course) from (course.refusal or exc)
        finally:
            course.refusal = None  # its traceback has frames that keep the course: a cycle


def _attempt(
    attempt: Callable[[Address, Address | None, Course], Coroutine[object, object, T]],
    origins: Mapping[Address, Address | None],
    course: Course,
    address: Address,
) -> Coroutine[object, object, T]:
    """Return the connect to one of the addresses, from the origin that belongs to it."""
    origin = origins[address]
    make = functools.partial(attempt, address, origin, course)
    if origin is None or not origin[1]:
        make = functools.partial(_from_a_free_port, make)
    return paced(address, make, course)


async def _from_a_free_port(attempt: Callable[[], Coroutine[object, object, T]]) -> T:
    """Await `attempt()`, and again while the local port that the kernel has chosen is taken.

    On iWARP the id's port is a port of TCP, too.  The kernel's connection manager chooses it
    without a look at the ports that sockets have.
    """
    for _ in range(_PORTS - 1):
        try:
            return await attempt()
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
    return await attempt()


def _too_late(text: str, course: Course) -> ConnectTimeoutError:
    """Return the error of a deadline, whose text names the step that was under way."""
    if not course.limit.seconds:
        text += ": that time was over before"
        hint = "give it the time that is left of a deadline, and check that some is left"
    elif not course.ready:
        text += ": the RDMA libraries of this machine were not loaded in that time"
        hint = "is this machine very busy?"
    elif course.refusal is not None:
        text += f", refused {course.refusals} times: {course.refusal.hint}"
        hint = "the listener's program accepts too slowly, or its backlog is too small"
    elif course.waiting and not course.asked:
        text += f": {course.waiting} connects of this loop to that address were under way before it"
        hint = "begin fewer at a time, or give them more time"
    elif course.heard:
        text += ": no answer, while other connects to that address were answered"
        hint = "the listener, or this event loop, is too busy"
    elif course.asked:
        text += ": no answer to the request"
        hint = "is the peer up and its program running, is UDP port 4791 (RoCE) open?"
    else:
        text += ": the route to it was not found"
        hint = "is the peer up, is the address right?"
    error = ConnectTimeoutError(errno.ETIMEDOUT, f"{text} ({hint})")
    error.hint = hint
    return error


async def way_to(
    address: Address,
    local_addr: Address | None,
    *,
    reuse_address: bool = False,
    tos: int | None = None,
    limit: float | None,
) -> tuple[ConnectionId, Callable[[], None]]:
    """Return a connection id that has its device and its route, and its channel's release.

    Both belong to the caller: it closes the connection id, then calls the release.

    Args:
        address: The peer's address and port.
        local_addr: Local (address, port), or None.
        reuse_address: Share the local address with other ids that share it.
        tos: Type of service, or None.
        limit: Seconds for both steps; None for no limit of the caller's.

    Raises:
        ConnectionFailedError, DeviceNotFoundError: There is no way.

    Cancellation: the id is closed and the channel is released.
    """
    channel, release = shared_channel()
    try:
        cm_id = ConnectionId(channel)
    except BaseException:
        release()
        raise
    try:
        if reuse_address:
            cm_id.set_option(Option.ID_REUSEADDR, 1)
        if tos is not None:
            cm_id.set_option(Option.ID_TOS, tos)
        limited = limit is not None
        await cm_id.find(address, local_addr, limit or _STEP_S, limited=limited)
    except BaseException:
        cm_id.close()
        release()
        raise
    return cm_id, release


async def _ways(host: str, port: int, local_addr: Address | None) -> dict[Address, Address | None]:
    """Return the peer's addresses, each with the local address to connect from."""
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
        raise ConnectionFailedError(errno.EAFNOSUPPORT, text)
    return dict(ways)


def _is_v6(address: Address) -> bool:
    return ":" in address[0]
