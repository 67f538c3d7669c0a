"""Destinations: from the address of a datagram to the queue pair that it is for.

Theory of operation
    Three kinds of address lead to a way (address handle, queue pair, key): a service is asked for
    by a connection id that lives no longer than the question; a group is joined, as a member that
    only sends if the program has not joined it; the source of a datagram names its queue pair
    itself.

    Finding a destination takes a while.  So each destination has a task of its own, with a
    deadline, and keeps the datagrams that wait for it.  The transport bounds their bytes.

    The program asks for services and groups.  Peers make it ask for sources, and a peer can forge
    its source: an address that does not answer costs the kernel three seconds.  So services and
    groups share nothing with sources.  At most `MOST_AT_A_TIME` services and groups are looked for
    at a time.  A source whose next hop the kernel knows, such as a peer that has just resolved this
    host, gets its address handle at once.  For the other sources `MOST_UNRESOLVED` next hops
    are resolved at a time, without a thread each (datagram/neighbors.py), and as many sources wait
    for that; when a further source comes, the one that has waited longest is given up.  Sources
    leave the program's own destinations half of `MOST_DESTINATIONS`.

    A restarted service has another queue pair, a repaired host another network card, and datagrams
    to the old destination vanish.  So a destination that is used for long is looked for again while
    datagrams go there (`refresh_s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from aiordma._ffi import lib
from aiordma.cm.address import Address
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.enums import PortSpace
from aiordma.datagram.config import DatagramAddress, DatagramConfig, Key
from aiordma.datagram.groups import Groups
from aiordma.datagram.neighbors import Neighbors, NextHop, look
from aiordma.datagram.port import DatagramPort
from aiordma.errors import (
    ConnectTimeoutError,
    DeviceNotFoundError,
    errno_error,
    prefix_address,
    prefix_subject,
)
from aiordma.loop import background
from aiordma.loop.limit import Limit
from aiordma.loop.workers import WorkerPool, answering, answering_slowly, call_blocking
from aiordma.verbs.ah import GRH, AddressHandle, AHAttributes, gid_of, host_of
from aiordma.verbs.enums import GIDType
from aiordma.verbs.wc import WCRecord, WorkCompletion

__all__ = ["Destination", "Destinations"]

#: Destinations that are kept; the one that was not used for longest is forgotten first.
MOST_DESTINATIONS = 1024
#: Senders whose addresses are remembered.
MOST_SOURCES = 4096
#: Senders to be answered whose next hop the kernel does not know, and resolves, at a time; as many
#: again wait.  Such a sender may have forged its address; the kernel has room for 1,024 neighbors
#: by default, and keeps each that is silent for 3 s.
MOST_UNRESOLVED = 128
MOST_AT_A_TIME = 32  # services and groups that are looked for
_MOST_BLINDLY = 2  # sources for which the kernel does not report whether it knows the next hop
T = TypeVar("T")
_Source = tuple[bytes, int]
_First = tuple[DatagramAddress, WCRecord, GRH]
_QuickWay = tuple[AHAttributes, str, NextHop | None, AddressHandle | None]


class Destination:
    """A destination of datagrams."""

    __slots__ = ("ah", "found_at", "key", "pending", "qkey", "qpn", "queued", "task")

    def __init__(self, key: Key) -> None:
        self.key: tuple[str, str, int] = key
        self.ah: AddressHandle | None = None  # until the destination is found
        self.qpn: int = 0
        self.qkey: int = 0
        self.pending: deque[bytes] = deque()  # datagrams that wait until it is found
        self.queued: int = 0  # datagrams that wait for the adapter
        self.found_at: float = 0.0
        self.task: asyncio.Task[None] | None = None

    @property
    def is_source(self) -> bool:
        """Whether the destination is the sender of a datagram, not a service or a group."""
        return self.key[0] == "queue"


class Destinations:
    """All destinations and sources of one endpoint.

    Args:
        port, groups, config: The endpoint's.
        found: Called when a destination is found.
        failed: Called when a destination was not found; it is forgotten then.
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
        # Services and groups; and sources.  Each in the order of the last use.
        self._asked: OrderedDict[Key, Destination] = OrderedDict()
        self._answered: OrderedDict[Key, Destination] = OrderedDict()
        self._places = asyncio.Semaphore(MOST_AT_A_TIME)
        # At most half of the destinations; otherwise sources that have a place would be given up.
        self._resolving = asyncio.Semaphore(min(MOST_UNRESOLVED, (MOST_DESTINATIONS + 1) // 2))
        self._blindly = asyncio.Semaphore(_MOST_BLINDLY)
        self._line: dict[Destination, None] = {}  # sources that wait for a place of these
        self._neighbors = Neighbors()
        self._closed = False
        # By queue pair of a peer: the service it answered for, and its first datagram's source.
        self._services: dict[_Source, Address] = {}
        self._sources: OrderedDict[_Source, _First] = OrderedDict()

    # Destinations

    def get(self, key: Key) -> Destination:
        """Return the destination of a key; if it is not known, it is looked for from now on.

        Raises:
            OSError: ENOBUFS: there are too many destinations, and all are in use.
        """
        table = self._table(key)
        destination = table.get(key)
        if destination is None:
            if len(self) >= MOST_DESTINATIONS:
                self._evict(for_source=table is self._answered)
            destination = table[key] = Destination(key)
            self._look_for(destination)
            return destination
        table.move_to_end(key)
        refresh = self._config.refresh_s
        if (
            refresh is not None
            and destination.task is None
            and key[0] != "group"
            and self._loop.time() - destination.found_at > refresh
        ):
            self._look_for(destination)
        return destination

    def __len__(self) -> int:
        """Number of destinations."""
        return len(self._asked) + len(self._answered)

    def _table(self, key: Key) -> OrderedDict[Key, Destination]:
        return self._answered if key[0] == "queue" else self._asked

    def _evict(self, *, for_source: bool) -> None:
        """Make room for a further destination."""
        own, others = self._asked, self._answered
        if for_source:
            own, others = others, own
        has_half = 2 * len(own) >= MOST_DESTINATIONS
        tables = [own, others] if has_half else [others, own]
        if has_half and for_source:
            tables = [own]
        for destination in itertools.chain.from_iterable(table.values() for table in tables):
            if destination.task is None and not destination.queued:
                self._forget(destination)
                return
        sources = itertools.chain(self._line, self._answered.values())
        victim = next((source for source in sources if source.ah is None), None)
        if victim is None and not for_source:
            victim = next(iter(self._answered.values()), None)
        if victim is None:
            msg = f"{len(self)} destinations are in use"
            raise errno_error(errno.ENOBUFS, msg)
        self._give_up(victim)

    def _stop(self, destination: Destination) -> None:
        """Stop looking for a source."""
        self._line.pop(destination, None)
        if destination.task is not None:
            destination.task.cancel()
            destination.task = None

    def _give_up(self, destination: Destination) -> None:
        """Forget a source whose place others need; its datagrams are lost."""
        self._stop(destination)
        self._forget(destination)
        text = "given up, because others wait for an answer, too"
        hint = "are their addresses forged?"
        error = errno_error(errno.ENOBUFS, text, hint)
        self._loop.call_soon(self._report, destination, error)

    def _report(self, destination: Destination, error: OSError) -> None:
        _name(error, destination.key)
        if not self._closed:
            self._failed(destination, error)

    def _forget(self, destination: Destination) -> None:
        table = self._table(destination.key)
        if table.get(destination.key) is destination:
            del table[destination.key]
        self._unname(destination)
        if destination.ah is not None:
            destination.ah.close()
            destination.ah = None

    def _unname(self, destination: Destination) -> None:
        """Forget that the destination's queue pair answers for its service."""
        if destination.ah is not None and destination.key[0] == "service":
            source = (destination.ah.attr.dgid, destination.qpn)
            if self._services.get(source) == destination.key[1:]:
                del self._services[source]
                self._sources.pop(source, None)

    def drop(self, key: Key) -> None:
        """Forget a destination; it is looked for again when it is used again."""
        destination = self._table(key).get(key)
        if destination is not None and destination.task is None and not destination.queued:
            self._forget(destination)

    def _look_for(self, destination: Destination) -> None:
        destination.task = background.start(self._loop, functools.partial(self._find, destination))

    async def find(self, key: Key) -> Destination:
        """Find a destination and return it.

        Raises:
            OSError: It was not found; the typed errors of `ConnectionId`.
        """
        destination = self._table(key)[key] = Destination(key)
        destination.task = asyncio.current_task()
        try:
            await self._way(destination)
        except BaseException as exc:
            self._forget(destination)
            if isinstance(exc, OSError):
                _name(exc, key)
            raise
        finally:
            destination.task = None
        return destination

    async def _find(self, destination: Destination) -> None:
        try:
            await self._way(destination)
        except Exception as exc:
            # Every exception is reported, so that no datagram waits for ever.
            destination.task = None
            self._forget(destination)
            error = exc if isinstance(exc, OSError) else OSError(errno.EIO, repr(exc))
            self._report(destination, error)
        else:
            destination.task = None
            if not self._closed:
                self._found(destination)

    async def _way(self, destination: Destination) -> None:
        if destination.key[0] == "queue":
            await self._answer(destination)
        else:
            async with self._places:
                await self._in_time(destination, self._request(destination))
        destination.found_at = self._loop.time()

    async def _in_time(self, destination: Destination, looking: Coroutine[Any, Any, T]) -> T:
        """Await `looking` for at most `resolve_timeout_s`; the time in a line does not count.

        Raises:
            ConnectTimeoutError: It took longer.
        """
        limit = Limit(self._config.resolve_timeout_s)
        try:
            with limit:
                return await looking
        except TimeoutError as exc:
            if not limit.expired or isinstance(exc, ConnectTimeoutError):
                raise
            text = f"not found within {self._config.resolve_timeout_s} s"
            raise ConnectTimeoutError(errno.ETIMEDOUT, text) from exc

    async def _request(self, destination: Destination) -> None:
        """Find a service or a group."""
        kind, host, number = destination.key
        if kind == "service":
            await self._ask(destination, (host, number))
        else:
            seconds = self._config.resolve_timeout_s
            event = await self._groups.join(host, send_only=True, timeout=seconds)
            await self._take(destination, event)

    async def _ask(self, destination: Destination, address: Address) -> None:
        """Find a service by service id resolution."""
        seconds = self._config.resolve_timeout_s
        local = self._port.cm_id.source_address
        assert local is not None
        asking = ConnectionId(self._port.cm_id.event_channel, PortSpace.UDP)
        asking._sink = lambda _: True
        try:
            await asking.resolve_addr(address, (local, 0), timeout=seconds)
            await asking.resolve_route(timeout=seconds)
            if asking.context is not self._port.context:
                msg = "the way leads through another device"
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

    async def _answer(self, destination: Destination) -> None:
        """Find the way to a queue pair that a datagram came from, or may come from."""
        host, qpn = destination.key[1:]
        source = self._sources.get((gid_of(host), qpn))
        attr, own, hop, ah = await call_blocking(
            lambda: quick_way(self._port, host, source), undo=_undo_way, pool=answering
        )
        if ah is None and hop is not None:
            async with self._place(destination, self._resolving):
                wait = self._neighbors.wait(hop, host, own)
                if await self._in_time(destination, wait):
                    ah = await self._make(attr, answering)
        if ah is None:
            async with self._place(destination, self._blindly):
                ah = await self._in_time(destination, self._make(attr, answering_slowly))
        self._set(destination, ah, qpn, int(lib.RDMA_UDP_QKEY))

    @contextlib.asynccontextmanager
    async def _place(
        self, destination: Destination, places: asyncio.Semaphore
    ) -> AsyncIterator[None]:
        """Wait in the line of sources for a place, and hold it for the block."""
        self._line[destination] = None
        if places.locked() and len(self._line) > MOST_UNRESOLVED:
            oldest = next(iter(self._line))
            if oldest.ah is None:
                self._give_up(oldest)
            else:  # it was being refreshed: its old address handle stays
                self._stop(oldest)
                oldest.found_at = self._loop.time()
        try:
            await places.acquire()
        finally:
            self._line.pop(destination, None)
        try:
            yield
        finally:
            places.release()

    async def _make(self, attr: AHAttributes, pool: WorkerPool) -> AddressHandle:
        pd = self._port.pd
        return await call_blocking(
            lambda: AddressHandle(pd, attr), undo=AddressHandle.close, pool=pool
        )

    def _set(self, destination: Destination, ah: AddressHandle, qpn: int, qkey: int) -> None:
        if destination.ah is not None:
            destination.ah.close()
        destination.ah, destination.qpn, destination.qkey = ah, qpn, qkey

    # Sources

    def source(self, grh: GRH, record: WCRecord) -> DatagramAddress:
        """Return the sender of a datagram, from its header and its completion."""
        source = (grh.sgid, record[7])
        known = self._sources.get(source)
        if known is None:
            # A peer can send from ever new queue pairs: the table has a bound.
            while len(self._sources) >= MOST_SOURCES:
                self._sources.popitem(last=False)
            host, port = self._services.get(source, (host_of(grh.sgid), 0))
            known = (DatagramAddress(host, port, record[7]), record, grh)
            self._sources[source] = known
        return known[0]

    # End

    @property
    def busy(self) -> bool:
        """Whether datagrams wait for a destination to be found."""
        return any(destination.pending for destination in self._all())

    @property
    def pending(self) -> int:
        """Number of datagrams that wait for a destination to be found."""
        return sum(len(destination.pending) for destination in self._all())

    def _all(self) -> list[Destination]:
        return [*self._asked.values(), *self._answered.values()]

    def close(self) -> None:
        """Stop looking; the address handles are destroyed when their sends have completed."""
        self._closed = True
        for destination in self._all():
            if destination.task is not None:
                destination.task.cancel()
            if destination.ah is not None:
                destination.ah.close()
        self._asked.clear()
        self._answered.clear()


def _name(error: OSError, key: Key) -> None:
    """Put the destination in front of the text of an error."""
    kind, host, number = key
    if kind == "service":
        prefix_address(error, host, number)
    else:
        prefix_subject(error, f"group {host}" if kind == "group" else f"{host} queue pair {number}")


def quick_way(port: DatagramPort, host: str, source: _First | None) -> _QuickWay:
    """Find the way to a source, and make its handle if no neighbor has to be asked; in a thread.

    Returns:
        Attributes of the handle, the local address, the next hop if the kernel reports it, and the
        handle if the kernel knows the hardware address of the next hop.
    """
    context, number = port.context, port.cm_id.port_num
    port.pd._retain()
    try:
        if source is not None:
            wc = WorkCompletion.from_record(source[1])
            attr = AHAttributes.from_wc(context, wc, source[2], number)
        else:
            attr = AHAttributes.to(context, host, port_num=number)
        own = context.query_gid(number, attr.sgid_index)
        local = host_of(own.gid)
        is_ib = own.type == GIDType.IB  # has no neighbors: its subnet manager knows all
        hop = None if is_ib else look(host, local, own.interface)
        known = is_ib or (hop is not None and hop.known)
        ah = AddressHandle(port.pd, attr) if known else None
        return attr, local, hop, ah
    finally:
        port.pd._let_go()


def _undo_way(way: _QuickWay) -> None:
    if way[3] is not None:
        way[3].close()
