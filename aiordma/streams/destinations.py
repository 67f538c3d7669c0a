"""Destinations: from the address of a datagram to the queue pair that it is for.

Theory of operation
    Three kinds of address lead to a way (address handle, queue pair, key): a service is asked for
    by an id that lives no longer than the question; a group is joined, as a member that only sends
    if the program has not joined it; the source of a datagram names its queue pair itself.

    Finding takes a while, so each destination has a task of its own, with a deadline, and keeps
    the datagrams that wait for it.  Their number of bytes is bounded by the transport.

    A service that is restarted has another queue pair, a host that is repaired another network
    card, and what is sent to the old one vanishes.  So what is used for long is looked for again
    beside the traffic (`refresh_s`).
"""

from __future__ import annotations

import asyncio
import errno
import functools
from collections import OrderedDict, deque
from collections.abc import Callable

from aiordma._ffi import lib
from aiordma.cm.address import Address
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.enums import PortSpace
from aiordma.errors import ConnectTimeoutError, DeviceNotFoundError, plain_error
from aiordma.loop import background
from aiordma.streams.datagram_config import DatagramAddress, DatagramConfig, Key
from aiordma.streams.datagram_port import DatagramPort
from aiordma.streams.groups import Groups
from aiordma.verbs.ah import GRH, AddressHandle, AHAttributes, gid_of, host_of
from aiordma.verbs.wc import WCRecord, WorkCompletion

__all__ = ["Destination", "Destinations"]

_MOST_AT_A_TIME = 32  # questions under way
_Source = tuple[bytes, int]


class Destination:
    """Where datagrams go.

    Attributes:
        key: What it was asked for by.
        ah: The way; None until it is found.
        qpn: The queue pair.
        qkey: Its key.
        pending: Datagrams that wait for it to be found.
        queued: Datagrams for it that wait for the adapter.
    """

    __slots__ = ("ah", "found_at", "key", "pending", "qkey", "qpn", "queued", "task")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.ah: AddressHandle | None = None
        self.qpn = 0
        self.qkey = 0
        self.pending: deque[bytes] = deque()
        self.queued = 0
        self.found_at = 0.0
        self.task: asyncio.Task[None] | None = None


class Destinations:
    """All destinations and sources of one endpoint.

    Args:
        port: The adapter's side.
        groups: Its multicast groups.
        config: Limits.
        found: Called when a destination has its way.
        failed: Called when it was not found; it is forgotten then.
    """

    def __init__(
        self,
        port: DatagramPort,
        groups: Groups,
        config: DatagramConfig,
        found: Callable[[Destination], None],
        failed: Callable[[Destination, OSError], None],
    ) -> None:
        self._port = port
        self._groups = groups
        self._config = config
        self._found = found
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._known: OrderedDict[Key, Destination] = OrderedDict()
        self._places = asyncio.Semaphore(_MOST_AT_A_TIME)
        self._closed = False
        # Peers of queue pairs: the services they answered for, and what first datagrams said.
        self._services: dict[_Source, Address] = {}
        self._sources: OrderedDict[_Source, tuple[DatagramAddress, WCRecord, GRH]] = OrderedDict()

    # Destinations

    def get(self, key: Key) -> Destination:
        """The destination, known already or being looked for from now on.

        Raises:
            OSError: ENOBUFS: there are too many, and all are in use.
        """
        destination = self._known.get(key)
        if destination is None:
            if len(self._known) >= self._config.max_destinations:
                self._evict()
            destination = self._known[key] = Destination(key)
            self._look_for(destination)
            return destination
        self._known.move_to_end(key)
        refresh = self._config.refresh_s
        if (
            refresh is not None
            and destination.task is None
            and key[0] != "group"
            and self._loop.time() - destination.found_at > refresh
        ):
            self._look_for(destination)
        return destination

    def _evict(self) -> None:
        for destination in self._known.values():
            if destination.task is None and not destination.queued:
                self._forget(destination)
                return
        msg = f"{len(self._known)} destinations are in use"
        raise plain_error(errno.ENOBUFS, msg)

    def _forget(self, destination: Destination) -> None:
        if self._known.get(destination.key) is destination:
            del self._known[destination.key]
        self._unname(destination)
        if destination.ah is not None:
            destination.ah.close()
            destination.ah = None

    def _unname(self, destination: Destination) -> None:
        """Its queue pair is not, or no longer, the service that it was asked for by."""
        if destination.ah is not None and destination.key[0] == "service":
            source = (destination.ah.attr.dgid, destination.qpn)
            if self._services.get(source) == destination.key[1:]:
                del self._services[source]
                self._sources.pop(source, None)

    def drop(self, key: Key) -> None:
        """Forget a destination; it is looked for again when it is used again."""
        destination = self._known.get(key)
        if destination is not None and destination.task is None and not destination.queued:
            self._forget(destination)

    def _look_for(self, destination: Destination) -> None:
        destination.task = background.start(self._loop, functools.partial(self._find, destination))

    async def find(self, key: Key) -> Destination:
        """The destination, once it is found.

        Raises:
            OSError: It was not found; the typed errors of `ConnectionId`.
        """
        destination = self._known[key] = Destination(key)
        destination.task = asyncio.current_task()
        try:
            await self._way(destination)
        except BaseException:
            self._forget(destination)
            raise
        finally:
            destination.task = None
        return destination

    async def _find(self, destination: Destination) -> None:
        try:
            await self._way(destination)
        except Exception as exc:
            # Whatever it is: no wait is for ever.
            destination.task = None
            self._forget(destination)
            error = exc if isinstance(exc, OSError) else OSError(errno.EIO, repr(exc))
            if not self._closed:
                self._failed(destination, error)
        else:
            destination.task = None
            if not self._closed:
                self._found(destination)

    async def _way(self, destination: Destination) -> None:
        kind, host, number = destination.key
        limit = asyncio.timeout(self._config.resolve_timeout_s)
        try:
            async with limit, self._places:
                if kind == "service":
                    await self._ask(destination, (host, number))
                elif kind == "group":
                    seconds = self._config.resolve_timeout_s
                    event = await self._groups.join(host, send_only=True, timeout=seconds)
                    await self._take(destination, event)
                else:
                    await self._answer(destination, gid_of(host), number)
        except TimeoutError as exc:
            if not limit.expired() or isinstance(exc, ConnectTimeoutError):
                raise
            text = f"no way to {kind} {host} {number} within {self._config.resolve_timeout_s} s"
            raise ConnectTimeoutError(errno.ETIMEDOUT, text) from exc
        destination.found_at = self._loop.time()

    async def _ask(self, destination: Destination, address: Address) -> None:
        """Service id resolution."""
        seconds = self._config.resolve_timeout_s
        local = self._port.home.source_address
        assert local is not None
        asking = ConnectionId(self._port.channel, PortSpace.UDP)
        asking._sink = _ignore
        try:
            await asking.resolve_addr(address, (local, 0), timeout=seconds)
            await asking.resolve_route(timeout=seconds)
            if asking.context is not self._port.context:
                msg = f"the way to {address} leads through another device"
                raise DeviceNotFoundError(errno.ENODEV, msg)
            event = await asking.connect(timeout=seconds)
        finally:
            asking.close()
        assert event.ah_attr is not None
        source = (event.ah_attr.dgid, event.qp_num)
        old = destination.ah
        if old is not None and (old.attr.dgid, destination.qpn) != source:
            self._unname(destination)
        await self._take(destination, event)
        if self._services.get(source) != address:
            self._services[source] = address
            self._sources.pop(source, None)

    async def _take(self, destination: Destination, event: ConnectionEvent) -> None:
        assert event.ah_attr is not None
        ah = await AddressHandle.create(self._port.pd, event.ah_attr)
        self._set(destination, ah, event.qp_num, event.qkey)

    async def _answer(self, destination: Destination, gid: bytes, qpn: int) -> None:
        """The queue pair that a datagram came from, or may come from."""
        context, number = self._port.context, self._port.home.port_num
        source = self._sources.get((gid, qpn))
        if source is not None:
            wc = WorkCompletion.from_record(source[1])
            attr = AHAttributes.from_wc(context, wc, source[2], number)
        else:
            attr = AHAttributes.to(context, host_of(gid), port_num=number)
        ah = await AddressHandle.create(self._port.pd, attr)
        self._set(destination, ah, qpn, int(lib.RDMA_UDP_QKEY))

    def _set(self, destination: Destination, ah: AddressHandle, qpn: int, qkey: int) -> None:
        if destination.ah is not None:
            destination.ah.close()
        destination.ah, destination.qpn, destination.qkey = ah, qpn, qkey

    # Sources

    def source(self, grh: GRH, record: WCRecord) -> DatagramAddress:
        """The sender of a datagram, from its header and its completion."""
        source = (grh.sgid, record[7])
        known = self._sources.get(source)
        if known is None:
            # A peer can send from ever new queue pairs: their number has a bound.
            while len(self._sources) >= self._config.max_sources:
                self._sources.popitem(last=False)
            host, port = self._services.get(source, (host_of(grh.sgid), 0))
            known = (DatagramAddress(host, port, record[7]), record, grh)
            self._sources[source] = known
        return known[0]

    # End

    @property
    def busy(self) -> bool:
        """Whether datagrams wait for a destination to be found."""
        return any(destination.pending for destination in self._known.values())

    def close(self) -> None:
        """Stop looking; the address handles are destroyed when their sends have completed."""
        self._closed = True
        for destination in self._known.values():
            if destination.task is not None:
                destination.task.cancel()
            if destination.ah is not None:
                destination.ah.close()
        self._known.clear()


def _ignore(event: ConnectionEvent) -> bool:
    """No reader is for the events of a question."""
    return True
