"""The listening ids of a listener: one for each address that it listens on.

A listener for both families has two ids, and the IPv6 id takes IPv6 clients only.  A single id on
`::` that takes IPv4 clients as well is not used: software iWARP resets their connections.
"""

from __future__ import annotations

import contextlib
import errno
import weakref
from collections.abc import Callable, Iterable, Sequence

from aiordma.cm.address import Address, is_loopback, look_up
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.enums import Option
from aiordma.cm.event_channel import EventChannel
from aiordma.errors import errno_error, prefix_address
from aiordma.link.dialing import way_to
from aiordma.logs import log_of
from aiordma.loop.limit import Limit

__all__ = [
    "Shortages",
    "choose",
    "leave",
    "listen_on",
    "require_device",
    "resolve",
    "wait_for_port",
]

_log = log_of("listener")
_TRIES = 10
# An address without an RDMA device, and a family that this machine has not.
_PASSED_OVER = (errno.ENODEV, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# Errors of the search for a way to loopback if no device leads there; they differ by device.
_NO_WAY = (errno.ENODEV, errno.ENOENT, errno.EINVAL, errno.ENETUNREACH, errno.EHOSTUNREACH)
# Ids of closed listeners, each with its port, which is taken until a thread has destroyed the id.
_leaving: weakref.WeakKeyDictionary[ConnectionId, int] = weakref.WeakKeyDictionary()


def is_worth_a_line(count: int) -> bool:
    """Whether an event that repeats is to be logged at this count: 1, 2, 4, 8, ..."""
    return count & (count - 1) == 0


class Shortages:
    """Clients that a listener has refused for lack of resources or because of its limits.

    Only some are logged: a shortage meets every client that comes.
    """

    def __init__(self) -> None:
        self._short = self._full = 0

    def tell(self, peer: Address | None, error: BaseException) -> None:
        """Count a client for which this process has no memory or descriptor."""
        if isinstance(error, ConnectionError) or not isinstance(error, (OSError, MemoryError)):
            return  # the client has left, or the listener is closed
        self._short += 1
        _warn(peer, error, self._short)

    def full(self, peer: Address | None, why: str) -> None:
        """Count a client that the limits of the listener refuse."""
        self._full += 1
        _warn(peer, why, self._full)


def _warn(peer: Address | None, why: object, count: int) -> None:
    if is_worth_a_line(count):
        _log.warning("refused %s: %s (%d clients so far)", peer, why, count)


async def resolve(host: str | None, port: int, seconds: float) -> list[Address]:
    """Return the local addresses of a name, to listen on.

    Raises:
        socket.gaierror: The name does not resolve; TimeoutError: not within `seconds`.
    """
    with Limit(seconds, f"resolving {host}", "does the name server answer?"):
        return await look_up(host, port, passive=True)


def choose(addresses: Sequence[Address], *, ipv6_only: bool) -> list[Address]:
    """Return the addresses to listen on: for `::` both wildcards, unless `ipv6_only`.

    Loopback addresses are left out beside others: many machines have them under their own name, and
    for the kernel they are wildcards, which take the port from the others.

    Raises:
        OSError: EAFNOSUPPORT, `ipv6_only` and no address is IPv6.
    """
    chosen: list[Address] = []
    for host, port in addresses:
        if ":" in host or not ipv6_only:
            chosen.append((host, port))
        if host == "::" and not ipv6_only:
            chosen.append(("0.0.0.0", port))
    if not chosen:
        hosts = ", ".join(host for host, _ in addresses)
        text = f"no IPv6 address to listen on: {hosts}"
        raise errno_error(errno.EAFNOSUPPORT, text, "`ip -6 address` lists this machine's")
    outside = [address for address in chosen if not is_loopback(address)]
    return list(dict.fromkeys(outside or chosen))


async def require_device(addresses: Sequence[Address], seconds: float) -> list[Address]:
    """Return the addresses without the loopback addresses to which no device leads.

    The kernel lets any program listen on loopback, but connects only if a device leads there.  An
    address that is not loopback is bound to its device, or refused, when it is listened on.

    Args:
        addresses: From `choose`.
        seconds: Limit of the search for a way.

    Raises:
        DeviceNotFoundError: All are loopback, and no device leads there.

    Cancellation: safe.
    """
    served: list[Address] = []
    for host, port in addresses:
        if is_loopback((host, port)):
            try:
                cm_id, release = await way_to((host, port or 1), None, limit=seconds)
            except OSError as exc:
                if exc.errno not in _NO_WAY:
                    raise
                _log.info("not listening on %s: %s", host, exc)
                continue
            cm_id.close()
            release()
        served.append((host, port))
    if not served:
        host, port = addresses[0]
        text = f"{host} port {port}: no RDMA device serves this address"
        hint = (
            "listen on an address of a device's network interface (`rdma link`, `ip address`), or "
            'on None or "" for all'
        )
        raise errno_error(errno.ENODEV, text, hint)
    return served


def listen_on(
    channel: EventChannel,
    addresses: Sequence[Address],
    backlog: int | None,
    sink: Callable[[ConnectionEvent], bool],
) -> list[ConnectionId]:
    """Return listening ids, all on one port; a port that the kernel chooses is free for all.

    Of several addresses those that belong to no RDMA device are passed over.  With `backlog` None
    the ids are bound and do not listen yet.

    Raises:
        OSError: No address can be listened on.  EADDRINUSE: an address is taken, and no id listens.
    """
    tries = 1 if addresses[0][1] else _TRIES
    while True:
        tries -= 1
        try:
            return _listen_once(channel, addresses, backlog, sink)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or not tries:
                raise


def _listen_once(
    channel: EventChannel,
    addresses: Sequence[Address],
    backlog: int | None,
    sink: Callable[[ConnectionEvent], bool],
) -> list[ConnectionId]:
    ids: list[ConnectionId] = []
    passed_over: OSError | None = None
    with contextlib.ExitStack() as undo:
        for host, wanted in addresses:
            port = ids[0].source_port if ids else wanted
            cm_id = ConnectionId(channel)
            undo.callback(cm_id.close)
            try:
                if ":" in host:
                    cm_id.set_option(Option.ID_AFONLY, 1)
                cm_id._sink = sink
                cm_id.bind_addr((host, port))
                if backlog is not None:
                    cm_id.listen(backlog)
            except OSError as exc:
                cm_id.close()
                prefix_address(exc, host, port)
                if len(addresses) == 1 or exc.errno not in _PASSED_OVER:
                    raise
                _log.info("not listening on %s: %s", host, exc)
                passed_over = passed_over or exc
            else:
                ids.append(cm_id)
        try:
            if passed_over is not None and not ids:
                raise passed_over
        finally:
            del passed_over  # its traceback has this frame: a cycle
        undo.pop_all()
    return ids


def leave(ids: Iterable[ConnectionId]) -> None:
    """Close listening ids; `wait_for_port` knows them from now on."""
    for cm_id in ids:
        if not cm_id.closed:
            _leaving[cm_id] = cm_id.source_port
            cm_id.close()


async def wait_for_port(addresses: Sequence[Address], seconds: float) -> None:
    """Wait until the closed listeners of this process have freed the port of `addresses`.

    asyncio's servers free their port in `close()`, and programs listen on it again at once.  Here a
    thread destroys the id, because the call may block.

    Args:
        addresses: The addresses to listen on, all with one port.
        seconds: Limit; after it the call that binds reports that the port is taken.

    Cancellation: safe.
    """
    port = addresses[0][1]
    for cm_id in [each for each, taken in _leaving.items() if taken == port]:
        with contextlib.suppress(OSError):
            await cm_id.wait_closed(seconds)
